"""The final table of gpu_tensorcore.py: our arms and vLLM's side by side, per shape, with ratios of time.

It measures nothing. Rules: a figure that an arm did not give is a dash, never left out; a ratio above 1 means that
`tensorcore` was slower; a target that could not be judged is not met.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

OURS = "tensorcore"
SHAPES = {"8B shape": "", "SmolLM2's shape": "smollm2 "}  # title to the prefix of its arms' names
Arms = Mapping[str, Mapping[str, Any]]


class Other(NamedTuple):
    """An arm that ours is compared with: ours may take `most` times as long."""

    name: str
    most: float


OTHERS = (Other("native", 1.03), Other("vllm ordinary", 1.15), Other("vllm invariant", 1.0))


def seconds_of(arm: Mapping[str, Any]) -> dict[str, float]:
    """Workload to the time that counts in it: seconds of a row, milliseconds of one sequence."""
    found = {f"{name}, s": float(row["s"]) for name, row in arm.get("rows", {}).items()}
    for prompt, times in arm.get("single", {}).items():
        for kind in ("first token ms", "between tokens ms"):
            found[f"one sequence, prompt {prompt}, {kind}"] = float(times[kind])
    return found


def markdown(arms: Arms) -> str:
    """The tables of all shapes of which an arm ran."""
    return "\n\n".join(_shape(title, prefix, arms) for title, prefix in SHAPES.items()
                       if any(seconds_of(arms.get(prefix + name, {})) for name in _names()))  # fmt: skip


def missed(arms: Arms) -> list[str]:
    """Every workload in which ours is behind its target, or has nothing to be compared with."""
    found = []
    for title, prefix in SHAPES.items():
        ours = seconds_of(arms.get(prefix + OURS, {}))
        for other in OTHERS:
            theirs = seconds_of(arms.get(prefix + other.name, {}))
            for workload, mine in ours.items():
                if workload not in theirs:
                    found.append(f"{title}, {workload}: no figure of {other.name}")
                elif mine > other.most * theirs[workload]:
                    found.append(f"{title}, {workload}: {mine / theirs[workload]:.2f} of {other.name}'s time, "
                                 f"target {other.most:g}")  # fmt: skip
    return found


def _names() -> list[str]:
    return [OURS, *(other.name for other in OTHERS)]


def _shape(title: str, prefix: str, arms: Arms) -> str:
    times = {name: seconds_of(arms.get(prefix + name, {})) for name in _names()}
    workloads = list(dict.fromkeys(workload for found in times.values() for workload in found))
    heads = [*_names(), *(f"{OURS} / {other.name} (target {other.most:g})" for other in OTHERS)]
    lines = [f"### {title}", "", f"| workload | {' | '.join(heads)} |", f"|{'---|' * (len(heads) + 1)}"]
    for workload in workloads:
        mine = times[OURS].get(workload)
        cells = [_figure(times[name].get(workload)) for name in _names()]
        cells += [_ratio(mine, times[other.name].get(workload)) for other in OTHERS]
        lines.append(f"| {workload} | {' | '.join(cells)} |")
    counted = [_census(arms.get(prefix + name, {})) for name in _names()]
    lines.append(f"| distinct completions of one prompt | {' | '.join(counted)} |{'  |' * len(OTHERS)}")
    return "\n".join(lines)


def _census(arm: Mapping[str, Any]) -> str:
    census = arm.get("census")
    return f"{census['distinct']} of {census['copies']}" if census else "-"


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _ratio(mine: float | None, theirs: float | None) -> str:
    return "-" if mine is None or theirs is None else f"{mine / theirs:.2f}"
