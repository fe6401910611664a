"""The record of a run: `run.json`, from plan, captures and verdicts to plain data with a schema number.

It does not know engines or how reports look. Rules: everything a report shows is in it; times are UTC; written whole
or not at all; it carries the digest of its own content, and one that was edited is an error wherever it is read.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from harness import __version__
from harness.capture import Capture
from harness.engine import Field
from harness.errors import OutputError, StoreError
from harness.execute import Execution, describe
from harness.judge import Captures
from harness.matrix import schema_mistake
from harness.plan import Pair, Plan
from harness.seal import check_seal
from harness.verdict import Verdict

SCHEMA = 1
RECORD = "run.json"
PLAN = "plan.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Exit code and sentence, times and durations of a run."""

    exit_code: int
    sentence: str
    started: datetime
    finished: datetime
    seconds: float
    worker_seconds: float


def run_record(
    plan: Plan,
    verdicts: Sequence[Verdict],
    captures: Captures,
    execution: Execution,
    outcome: Outcome,
    observer: Sequence[Field],
) -> dict[str, object]:
    """The whole run as JSON-able data."""
    pairs = {pair.label: pair for pair in plan.pairs}
    subject = next((c.subject for c in captures.values() if isinstance(c, Capture)), ())
    return {
        "schema": SCHEMA,
        "samebits": __version__,
        "matrix": {
            "name": plan.matrix.name,
            "path": _shown_path(plan.matrix.path),
            "digest": plan.matrix.digest,
            "left_out": list(plan.matrix.left_out),
        },
        "engine": plan.engine,
        "model": plan.model,
        "settings": dict(plan.settings),
        "chosen": {name: value for name, value in plan.settings if name in plan.chosen},
        "started": _utc(outcome.started),
        "finished": _utc(outcome.finished),
        "seconds": {
            "total": round(outcome.seconds, 3),
            "workers": round(outcome.worker_seconds, 3),
            "outside": round(outcome.seconds - outcome.worker_seconds, 3),
        },
        "exit_code": outcome.exit_code,
        "outcome": outcome.sentence,
        "plan": {**plan.counts, "judged": len(verdicts), "digest": plan.digest},
        "verdicts": [verdict_record(plan, pairs[verdict.label], verdict) for verdict in verdicts],
        "cases": [_case_record(plan, case, captures, execution) for case in plan.cases],
        "fingerprint": {"observer": _fields(observer), "subject": _fields(subject)},
        "cost": None,
    }


def verdict_record(plan: Plan, pair: Pair, verdict: Verdict) -> dict[str, object]:
    """One verdict with what it is about."""
    cell = pair.cell
    corpus = plan.corpora.get((cell.model or plan.model, cell.corpus))
    return {
        "cell": cell.name,
        "variant": pair.label.partition("[")[2].rstrip("]"),
        "label": pair.label,
        "invariant": cell.invariant,
        "rule": cell.rule,
        "replay": cell.replay,
        "axis": {"name": cell.axis.name, "reference": cell.reference, "variant": pair.variant,
                 "home_layer": cell.axis.home},
        "corpus": {
            "name": cell.corpus,
            "digest": corpus.digest if corpus else None,
            "requests": len(corpus.requests) if corpus else None,
            "longest_prompt": corpus.longest_prompt if corpus else None,
            "weak": corpus.weak if corpus else None,
        },
        "verdict": str(verdict.verdict),
        "expected": str(verdict.expected) if verdict.expected else None,
        "foreseen": verdict.foreseen,
        "reason": verdict.reason,
        "claims": list(verdict.claims),
        "caps": list(verdict.caps),
        "floor": _plain(verdict.floor),
        "comparison": _plain(verdict.comparison),
        "control": _control(verdict),
        "diagnosis": _plain(verdict.diagnosis),
        "agreement": _plain(verdict.agreement),
        "undeclared": list(verdict.undeclared),
        "error": {"message": verdict.failure.message, "log_tail": list(verdict.failure.log_tail)}
        if verdict.failure else None,
        "cases": {"reference": pair.reference, "floor": pair.floor, "variant": pair.varied,
                  "control_reference": pair.control_reference, "control_floor": pair.control_floor,
                  "control_variant": pair.control_varied},
        "digests": dict(verdict.digests or {}),
    }  # fmt: skip


def _control(verdict: Verdict) -> object:
    if verdict.control is None:
        return None
    record = dataclasses.asdict(verdict.control)
    record["verdict"] = record.pop("sentence")
    return record


def _plain(value: object) -> object:
    if value is None:
        return None
    return dataclasses.asdict(value)  # type: ignore[call-overload]


def _case_record(plan: Plan, case_id: str, captures: Captures, execution: Execution) -> dict[str, object]:
    case = plan.cases[case_id]
    capture = captures.get(case_id)
    made = capture if isinstance(capture, Capture) else None
    return {
        "id": case_id,
        "schedule": case.schedule.name,
        "replay": case.replay,
        "repetition": case.repetition,
        "configuration": dict(case.lifetime.settings),
        "summary": describe(case, plan.settings),
        "lifetime": case.lifetime.id,
        "requests": len(case.requests),
        "positions": int(made.traces.requests.length.sum()) if made else None,
        "seconds": round(made.seconds, 3) if made else None,
        "judged_digest": made.judged_digest if made else None,
        "process_nonce": made.process_nonce if made else None,
        "reused": case_id in execution.reused,
    }


def _fields(fields: Sequence[Field]) -> list[dict[str, object]]:
    return [{"name": f.name, "value": f.value, "class": f.field_class, "source": f.source} for f in fields]


def _utc(time: datetime) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ")


def _shown_path(path: Path) -> str:
    """A path without the folders above the package or the working directory."""
    for base in (Path.cwd(), Path(__file__).resolve().parent.parent):
        if path.resolve().is_relative_to(base):
            return str(path.resolve().relative_to(base))
    return path.name


def write_json(file: Path, value: Mapping[str, object]) -> None:
    """Writes JSON whole or not at all. Raises OutputError."""
    aside = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        aside.write_text(json.dumps(value, indent=1, sort_keys=False, allow_nan=False) + "\n", encoding="utf-8")
        aside.replace(file)
    except OSError as error:
        with contextlib.suppress(OSError):
            aside.unlink()
        raise OutputError(f"{file}: cannot be written: {error.strerror}; free space or choose another --out") from error


def read_record(folder: Path) -> dict[str, object]:
    """A run's `run.json`. Raises StoreError."""
    file = folder / RECORD
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise StoreError(f"{file}: no such file; name the folder of a finished run (one that was interrupted has none "
                         "yet: the same `samebits run` with the same --out resumes it)") from error  # fmt: skip
    except (OSError, ValueError) as error:
        raise StoreError(f"{file}: expected the record of a finished run: {error}") from error
    message = schema_mistake(record.get("schema") if isinstance(record, dict) else None, SCHEMA)
    if message:
        raise StoreError(f"{file}: $.schema: {message}")
    check_seal(record, file, "restore it, or run again")
    return dict(record)
