"""Scores of captures by rules, beside the determinism verdict: what a drift is worth in points."""
