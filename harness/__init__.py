"""samebits: a reproducibility acceptance-matrix harness for LLM inference.

The harness plans, captures, compares and judges. It imports neither `engines` nor `reports`; the command line and
the pytest plugin reach both through one table of names (`harness.registry`).
"""

__version__ = "0.1.0"
