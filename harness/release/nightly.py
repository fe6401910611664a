"""A nightly: gate a finished run against the last accepted baseline, append it to the history, and say the trend.

It does not run engines. Rules: the run is in the history whatever the gate decides; the decision is the gate's; a drift
names the first run that has it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from harness.baseline.entry import Key
from harness.baseline.shelf import Shelf
from harness.errors import OutputError
from harness.fingerprint import Fingerprint
from harness.finished import FinishedRun
from harness.release.decision import Decision
from harness.release.gate_run import GateInputs, gate
from harness.release.history import History
from harness.release.trend import onset_of, trend

TREND = "trend.json"
TREND_PAGE = "trend.html"
BASELINES = "baselines"  # beside the history, unless named


@dataclass(frozen=True, slots=True, kw_only=True)
class Nightly:
    """What a night came to: the decision, one line per pair, where drifts began, and what of the history is damaged."""

    decision: Decision
    states: tuple[str, ...]
    onsets: tuple[str, ...]
    damaged: tuple[str, ...]
    trend: Mapping[str, object]


def conclude_night(run: FinishedRun, history_url: str, inputs: GateInputs, now: datetime) -> Nightly:
    """Gates and records a finished run; `inputs.baselines` is given. Raises UsageError, StoreError, OutputError."""
    decision = gate(run, inputs, now)
    history = History(history_url)
    history.append(run, decision)
    past = history.read()
    shelf = Shelf(inputs.baselines or "")
    opener = _opener(shelf)
    onsets = [onset_of(history, past.of(run.engine, run.model, pair.label), opener(run.engine, run.model, pair.label))
              for pair in run.pairs]  # fmt: skip
    today = {night.label: night.state for night in past.nights if night.run == run.digest}
    return Nightly(
        decision=decision, states=tuple(f"{label}: {state}" for label, state in sorted(today.items())),
        onsets=tuple(onset.sentence for onset in onsets if onset is not None), trend=trend(history, past, opener),
        damaged=tuple(f"note: history {history_url}: {one}" for one in past.damaged),
    )  # fmt: skip


def write_trend(night: Nightly, folder: Path, page: Callable[[Mapping[str, object]], str]) -> None:
    """Writes trend.json and trend.html. Raises OutputError."""
    try:
        (folder / TREND).write_text(json.dumps(night.trend, indent=1) + "\n", encoding="utf-8")
        (folder / TREND_PAGE).write_text(page(night.trend), encoding="utf-8")
    except OSError as error:
        raise OutputError(f"{folder}: cannot be written: {error.strerror}") from error


def _opener(shelf: Shelf) -> Callable[[str, str, str], Callable[[], Fingerprint] | None]:
    def open_baseline(engine: str, model: str, label: str) -> Callable[[], Fingerprint] | None:
        cell, _, rest = label.partition("[")
        baseline = shelf.newest(Key(engine=engine, model=model, cell=cell, variant=rest.rstrip("]")))
        return None if baseline is None else lambda: shelf.fingerprint(baseline)

    return open_baseline
