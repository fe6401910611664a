"""Signed records that a named difference is accepted: their file, their signatures, and what they rule."""
