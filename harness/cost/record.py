"""The record of a measuring session: `cost.json`, plain data with a schema number, and Parquet tables beside it.

It does not judge or draw. Rules: everything a report shows is in it; written whole or not at all; times are UTC.

    cost.json              the record
    requests.parquet       one row per timed answer: arm, round, load, when each token came, digests
    metrics.parquet        one row per process, load and metric
    references/, logs/     untimed references as captures, and what each process printed
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import cast

import numpy as np

from harness import __version__
from harness.canonical import digest
from harness.corpus import Corpus
from harness.cost.arm import OFF, OFF_AGAIN, ON, Arm, Difference
from harness.cost.comparison import Comparison, Estimate, State, process_value, served_time
from harness.cost.interval import Interval, as_ratio
from harness.cost.load import Load
from harness.cost.metric import BY_NAME, PROCESS, curve, is_thin, latencies
from harness.cost.session import Session, Trial
from harness.cost.timing import write_rows
from harness.engine import Field
from harness.errors import StoreError
from harness.fingerprint import field_records
from harness.matrix import schema_mistake

SCHEMA = 1
RECORD = "cost.json"
REQUIRED = (
    "arms", "drifted", "engine", "fingerprint", "gate", "identical_arms", "model", "outcome", "primary", "state",
)  # fmt: skip
FAILURES = (State.NOT_REPRODUCIBLE, State.NOT_COMPUTED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Circumstances:
    """What surrounds a session."""

    engine: str
    model: str
    corpus: Corpus
    started: datetime
    finished: datetime
    seconds: float
    observer: tuple[Field, ...]
    differences: tuple[Difference, ...]


def cost_record(session: Session, found: Comparison, around: Circumstances) -> dict[str, object]:
    """The whole session as JSON-able data."""
    corpus = around.corpus
    failed = found.state in FAILURES
    return {
        "schema": SCHEMA,
        "samebits": __version__,
        "engine": around.engine,
        "model": around.model,
        "corpus": {"name": corpus.name, "digest": corpus.digest, "requests": len(corpus.requests),
                   "longest_prompt": corpus.longest_prompt, "weak": corpus.weak},
        "started": _utc(around.started),
        "finished": _utc(around.finished),
        "seconds": round(around.seconds, 3),
        "exit_code": 1 if failed else 0,
        "state": str(found.state),
        "outcome": found.sentence,
        "identical_arms": session.arms.same,
        "arms": {"on": _arm(session.arms.on), "off": _arm(session.arms.off),
                 "shown": [_arm(arm) for arm in session.arms.shown]},
        "design": _design(session),
        "primary": _estimate(found.primary),
        "rest": [_estimate(estimate) for estimate in found.rest],
        "unmeasured": [{"metric": name, "reason": reason} for name, reason in found.unmeasured],
        "differences": [asdict(difference) for difference in around.differences],
        "measured": [_measured(session, found, arm) for arm in session.arms.kinds()],
        "gate": {} if failed else gate_measures(found),
        "drifted": list(session.drifted),
        "notes": [*session.drifted, *_notes(session, around)],
        "fingerprint": {"observer": field_records(around.observer),
                        "subject": field_records(session.started[ON].fields)},
    }  # fmt: skip


def gate_measures(found: Comparison) -> dict[str, float]:
    """What a policy limits: upper ends of intervals, so that what is not known to be cheap does not count as cheap."""
    measures = {"slowdown": as_ratio(found.primary.effect.high)}
    names = {"peak_memory_bytes": "memory", "peak_device_bytes": "device_memory", "startup_s": "startup"}
    for estimate in found.rest:
        if estimate.metric.name in names:
            measures[names[estimate.metric.name]] = as_ratio(estimate.effect.high)
        elif estimate.metric.name == "seconds":
            measures[f"slowdown.{estimate.load}"] = as_ratio(estimate.effect.high)
    return {name: value for name, value in sorted(measures.items()) if value is not None}


def _arm(arm: Arm) -> dict[str, object]:
    return {"name": arm.name, "label": arm.label, "asked": dict(arm.asked), "settings": dict(arm.settings),
            "slowed": arm.slowed}  # fmt: skip


def _design(session: Session) -> dict[str, object]:
    design = session.design
    return {
        "pairs": design.pairs,
        "processes": len(session.trials),
        "order": [{"round": trial.turn.round, "arm": trial.turn.arm} for trial in session.trials],
        "loads": [_load(load) for load in design.loads],
        "seed": design.seed,
        "limits": None if design.limits is None else asdict(design.limits),
    }


def _load(load: Load) -> dict[str, object]:
    return {"name": load.name, "kind": load.kind, "concurrency": load.concurrency, "rate": load.rate,
            "requests": len(load.requests), "digest": digest(load)}  # fmt: skip


def _estimate(estimate: Estimate) -> dict[str, object]:
    return {
        "metric": estimate.metric.name, "title": estimate.metric.title, "unit": estimate.metric.unit,
        "load": estimate.load, "on": estimate.on, "off": estimate.off, "ratio": estimate.ratio,
        "low": as_ratio(estimate.effect.low), "high": as_ratio(estimate.effect.high),
        "identical": _ratios(estimate.identical), "pairs": list(estimate.pairs), "state": str(estimate.state),
    }  # fmt: skip


def _ratios(found: Interval) -> dict[str, float | None]:
    return {"ratio": as_ratio(found.mean), "low": as_ratio(found.low), "high": as_ratio(found.high)}


def _measured(session: Session, found: Comparison, arm: Arm) -> dict[str, object]:
    """One arm: its performance envelope beside its reproducibility envelope."""
    names = (OFF, OFF_AGAIN) if arm.name == OFF else (arm.name,)
    trials = [trial for trial in session.trials if trial.turn.arm in names]
    facts = found.facts[arm.name]
    by_load = dict(facts.by_load)
    return {
        "arm": arm.name,
        "label": arm.label,
        "processes": len(trials),
        "served_s": _median([served_time(session, trial) for trial in trials]),
        "process": {
            metric.name: _median([process_value(trial, metric.name) for trial in trials]) for metric in PROCESS
        },
        "loads": [
            {"load": load.name, **_serving(trials, load.name), "equality": asdict(by_load[load.name])}
            for load in session.design.loads
        ],
        "equality": asdict(facts.equality),
        "cache": asdict(facts.cache),
    }  # fmt: skip


def _serving(trials: Sequence[Trial], load: str) -> dict[str, object]:
    servings = [trial.serving(load) for trial in trials]
    names = dict.fromkeys(name for serving in servings for name in serving.metrics)
    per_trial = [latencies(serving.timings) for serving in servings]
    pooled = {kind: np.concatenate([found[kind] for found in per_trial]) for kind in per_trial[0]}
    lag = max(one.submitted_s - one.due_s for serving in servings for one in serving.timings)
    return {
        "metrics": {name: _median([serving.metrics.get(name) for serving in servings]) for name in names},
        "samples": {kind: int(np.median([len(found[kind]) for found in per_trial])) for kind in pooled},
        "curves": [{"latency": kind, "values": curve(values)} for kind, values in pooled.items()],
        "latest_hand_over_s": lag,
        "preemptions": sum(one.preemptions for serving in servings for one in serving.timings),
    }


def _notes(session: Session, around: Circumstances) -> list[str]:
    """What a reader must know before a ratio is believed."""
    notes = []
    if session.arms.same:
        notes.append("both arms are one configuration: whatever shows is noise")
    if session.arms.on.slowed != 1:
        notes.append(f"PLANTED: the on arm was slowed down {session.arms.on.slowed:g} times on purpose")
    if around.corpus.weak:
        notes.append(around.corpus.weak)
    seats = session.started[ON].resolved.get("max_num_seqs")
    most = max((load.concurrency or 0 for load in session.design.loads), default=0)
    if isinstance(seats, int) and most > seats:
        notes.append(f"concurrency {most} is more than the {seats} sequences the engine runs together: the rest queue")
    if any(not one.bounded for trial in session.trials if (one := trial.capacity) is not None):
        notes.append("in at least one process every probed rate was within the limits: its capacity is a lower bound")
    thin = [load.name for load in session.design.loads if is_thin(len(load.requests), "p99")]
    if thin:
        notes.append(f"p99 of TTFT and end-to-end latency rests on fewer than ten answers beyond it, and p99.9 needs "
                     f"10,000: {', '.join(thin)}")  # fmt: skip
    if not session.arms.shown:
        return notes
    return [*notes, f"{', '.join(arm.name for arm in session.arms.shown)}: shown beside, never the cost of determinism"]


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(np.median(known)) if known else None


def _utc(time: datetime) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ")


def write_tables(session: Session, folder: Path) -> None:
    """The Parquet tables; the single servings' files are theirs and go. Raises OutputError."""
    answers: list[dict[str, object]] = []
    metrics: list[dict[str, object]] = []
    for number, trial in enumerate(session.trials):
        place = {"process": number, "round": trial.turn.round, "arm": trial.turn.arm}
        for serving in trial.servings:
            answers += [{**place, "load": serving.load, **asdict(one)} for one in serving.timings]
            metrics += [{**place, "load": serving.load, "metric": name, "unit": BY_NAME[name].unit, "value": value}
                        for name, value in serving.metrics.items()]  # fmt: skip
        metrics += [{**place, "load": "", "metric": metric.name, "unit": metric.unit, "value": value}
                    for metric in PROCESS if (value := process_value(trial, metric.name)) is not None]  # fmt: skip
    write_rows(folder / "requests.parquet", answers)
    write_rows(folder / "metrics.parquet", metrics)
    shutil.rmtree(folder / "timings", ignore_errors=True)


def read_cost(file: Path) -> dict[str, object]:
    """A cost record. Raises StoreError."""
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise StoreError(f"{file}: expected the record of `samebits cost`: {error}") from error
    message = schema_mistake(record.get("schema") if isinstance(record, dict) else None, SCHEMA)
    if message:
        raise StoreError(f"{file}: $.schema: {message}")
    missing = [name for name in REQUIRED if name not in record]
    if missing:
        raise StoreError(
            f"{file}: expected the record of `samebits cost`, but {missing[0]!r} is missing; measure again"
        )
    return cast("dict[str, object]", record)


def is_failure(record: Mapping[str, object]) -> bool:
    """Whether the cost cell failed: a fast arm that is not reproducible, or one that did not compute."""
    return record["state"] in {str(state) for state in FAILURES}
