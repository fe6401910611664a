"""Shipped matrices, one folder each, one cell per TOML file (data only)."""
