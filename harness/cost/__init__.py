"""What the deterministic mode costs: paired, in fresh processes, with equality checked inside the timed run.

    arms + loads -> references (untimed) -> trials (ABBA, one process each) -> audit -> comparisons -> cost.json

It does not know how engines work or how reports look. Rules: latency counts from the moment a request was due, not
from the moment it could be handed over; no ratio without the same ratio between two identical arms; a fast arm whose
timed answers are not its reference's has no cost but a failure.
"""
