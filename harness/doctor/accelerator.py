"""Conditions that ask which accelerator is there. Text only; shared by the Python and the shell reader."""

from __future__ import annotations

import re

_COUNTS = re.compile(
    r"num_gpus?|n_gpus?|ngpus?|gpu_?count|device_count|gpu_memory\w*|CUDA_VISIBLE_DEVICES|gpus?_per_\w+|NUM_GPUS",
    re.IGNORECASE,
)
_ASKS = re.compile(
    r"cuda|nvidia|\bgpu|gpu\b|rocm|\bhip\b|npu|ascend|xpu|\bmps\b|accelerator|\baccel\b|device_type|device_name|capability|"
    r"\bsm_?\d\d|hopper|blackwell|\b[hb][12]00\b|\ba100\b",
    re.IGNORECASE,
)


def accelerator_test(test: str) -> str:
    """The condition, shortened, when it asks which accelerator is there; else ""."""
    if not _ASKS.search(_COUNTS.sub("", test)):
        return ""
    short = " ".join(test.split())
    return short if len(short) <= 80 else short[:77] + "..."
