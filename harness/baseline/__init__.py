"""Captures accepted earlier: where they are kept, how they are accepted, and how a run is held against them."""
