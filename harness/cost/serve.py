"""The engine process's side of a timed serving: drives one load and leaves the timings in a file.

It does not know arms or statistics. Rules: what the clock saw and what the engine's own tables hold must agree, token
for token, or the serving is an error; an answer's digest is taken under its corpus id.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

from harness.cost.drive import Clocked, drive
from harness.cost.load import copies, load_from_json, original
from harness.cost.plant import SlowedSession
from harness.cost.timing import Timing, write_timings
from harness.digest import digests_of
from harness.engine import Engine, Footprint, Timed
from harness.errors import EngineError, Unsupported
from harness.judged import Judged, RequestKey, find_judged

if TYPE_CHECKING:
    from harness.request import Request
    from harness.traces import Traces


def serve_timed(engine: Engine, requests: Sequence[Request], command: Mapping[str, object]) -> dict[str, object]:
    """Answers the command `time`: serves a load and writes its timings.

    Raises:
        Unsupported: an engine that cannot serve by the clock.
        EngineError: a lost request, or tables that contradict the clock.
    """
    if not isinstance(engine, Timed):
        raise Unsupported("this engine cannot serve by the clock, so what its mode costs cannot be measured")
    load = load_from_json(cast("dict[str, object]", command["load"]))
    timed = copies(load, requests)
    session, slowed = engine.open_timed(timed), cast("float", command["slowed"])
    clocked = drive(session if slowed == 1 else SlowedSession(session, slowed), load, timed)
    traces = session.finish()
    timings = timings_of(clocked, traces)
    file = Path(cast("str", command["file"]))
    digest = write_timings(file, timings)
    return {"event": "timed", "file": str(file), "sha256": digest, "footprint": footprint_json(engine.footprint())}


def footprint_json(footprint: Footprint) -> dict[str, object]:
    """A footprint as plain data."""
    return dataclasses.asdict(footprint)


def timings_of(clocked: Sequence[Clocked], traces: Traces) -> tuple[Timing, ...]:
    """What the clock saw, joined with the engine's tables. Raises EngineError where they disagree."""
    found = find_judged(traces, "timed serving")
    table = traces.requests
    rows = {key: j for j, key in enumerate(found.keys)}
    asked = {RequestKey(one.request, one.sample) for one in clocked}
    if strange := sorted(asked.symmetric_difference(rows)):
        raise EngineError(f"request {strange[0]}: the engine's tables and what was asked for do not hold the same")
    renamed = tuple(RequestKey(original(key.id)[0], key.sample) for key in found.keys)
    judged = digests_of(traces, dataclasses.replace(found, keys=renamed))
    computed = _computed(traces)
    timings = []
    for one in clocked:
        j = rows[RequestKey(one.request, one.sample)]
        row, length = int(found.rows[j]), int(found.lengths[j])
        if one.finish_s is None or len(one.token_s) != length:
            raise EngineError(f"request {one.request!r}: {len(one.token_s)} tokens came and the engine's tables hold "
                              f"{length}; its timings cannot be trusted")  # fmt: skip
        name, copy = original(one.request)
        timings.append(Timing(
            request=name, copy=copy, sample=one.sample, prompt_tokens=int(table.prompt_tokens[row]),
            cached_tokens=int(table.cached_tokens[row]), computed_tokens=None if computed is None else computed[row],
            preemptions=int(table.preemptions[row]), due_s=one.due_s, submitted_s=one.submitted_s,
            finish_s=one.finish_s, token_s=tuple(one.token_s), judged=judged[j],
            tokens_only=_tokens_digest(traces, found, j),
        ))  # fmt: skip
    return tuple(timings)


def tokens_only(traces: Traces) -> dict[RequestKey, str]:
    """Digest of each judged request's tokens and finish reason alone."""
    found = find_judged(traces)
    return {key: _tokens_digest(traces, found, j) for j, key in enumerate(found.keys)}


def _tokens_digest(traces: Traces, found: Judged, j: int) -> str:
    begin, length = int(found.starts[j]), int(found.lengths[j])
    tokens = traces.positions.token[begin : begin + length].astype("<i4").tobytes()
    return hashlib.sha256(tokens + traces.requests.finish_reason[int(found.rows[j])].encode()).hexdigest()


def _computed(traces: Traces) -> list[int] | None:
    """Different tokens each row of the request table had computed, by the step table."""
    if traces.steps is None:
        return None
    spans: dict[int, set[int]] = {}
    steps = traces.steps
    for row, start, count in zip(steps.request.tolist(), steps.start.tolist(), steps.count.tolist(), strict=True):
        spans.setdefault(row, set()).update(range(start, start + count))
    return [len(spans.get(row, ())) for row in range(len(traces.requests.id))]
