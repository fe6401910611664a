"""What an arm of gpu_tensorcore.py found that an arithmetic with one form of bits must not show, in words.

It measures nothing. Rules: what an arm did not look at is not judged here; a control that shows nothing is a fault too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

ROUND = "that round"  # in the name of ranks that must differ


def wrong_bits(found: Mapping[str, Any]) -> list[str]:
    """Of an arm's results; empty if everything is as it has to be."""
    return [*_census(found), *_alone(found), *_memory(found), *_ranks(found), *_reports(found)]


def _census(found: Mapping[str, Any]) -> list[str]:
    if not (census := found.get("census")):
        return []
    wrong = []
    if census["distinct"] != 1:
        wrong.append(f"{census['distinct']} distinct completions of one prompt")
    if census["equal to the prompt alone"] != census["copies"]:
        wrong.append(f"{census['equal to the prompt alone']} of {census['copies']} copies equal the prompt alone")
    return wrong


def _alone(found: Mapping[str, Any]) -> list[str]:
    counts = found.get("alone", {})
    return [f"{counts[key]} of {counts['requests']} requests {key}"
            for key in ("differ shuffled", "differ alone") if counts.get(key)]  # fmt: skip


def _memory(found: Mapping[str, Any]) -> list[str]:
    if not (memory := found.get("memory")):
        return []
    wrong = [] if memory["same tokens"] else ["the same requests got other tokens the second time"]
    free, left = memory["before"][2], memory["after"][2]
    return wrong if free == left else [*wrong, f"{free} pages were free before the same requests, {left} after them"]


def _ranks(found: Mapping[str, Any]) -> list[str]:
    wrong = []
    for name, count in found.get("ranks", {}).items():
        if not name.endswith(", differing"):
            continue
        if ROUND in name and not count:
            wrong.append(f"{name.removesuffix(', differing')}: no logit differs, so the comparison shows nothing")
        elif ROUND not in name and count:
            wrong.append(f"{name.removesuffix(', differing')}: {count} logits differ")
    return wrong


def _reports(found: Mapping[str, Any]) -> list[str]:
    return [f"reports of {name.removesuffix(', differing')}: {count} differ"
            for name, count in found.get("reports", {}).items() if name.endswith(", differing") and count]  # fmt: skip
