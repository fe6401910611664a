"""Soaks: one server served for long, under background traffic that is written down."""
