"""Planted faults: in captures, in trials and in step tables, and the list of what each must come to."""
