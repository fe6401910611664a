"""Answers and steps of an offline engine as the harness's trace tables. It runs nothing and knows no engine.

Rules: a column that an engine cannot fill is absent as a whole, never padded into being; rows keep the order in which
requests were submitted; what was not seen to run in a step is not in the step table.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from engines.arrivals import Standing
from harness.errors import EngineError
from harness.request import Request
from harness.schedule import Arrival
from harness.traces import NO_TOKEN, Float32, Int32, PositionTable, RequestTable, StepTable, Traces, UInt64


class Position(NamedTuple):
    """One generated position. `logprob` and the candidates are raw float32 log-probabilities."""

    token: int
    pick: int  # NO_TOKEN where the engine cannot say what it would have taken
    logprob: np.float32
    ids: Sequence[int]  # (K,) by value descending, id ascending
    values: Sequence[float] | Float32  # (K,)
    digest: bytes | None = None  # 16 bytes over the logits


@dataclass(slots=True, kw_only=True)
class Answer:
    """One request under way. Times are seconds from the work's start."""

    request: Request
    arrival: Arrival
    arrival_s: float
    positions: list[Position] = field(default_factory=list)
    finish_reason: str = ""  # "stop" | "length" | "abort"; "" while it runs
    cached_tokens: int = 0
    drafted: int | None = None
    first_token_s: float = 0.0
    finish_s: float = 0.0

    @property
    def tokens(self) -> list[int]:
        """Output tokens so far."""
        return [position.token for position in self.positions]

    @property
    def standing(self) -> Standing:
        """How far it is."""
        return Standing(generated=len(self.positions), finished=bool(self.finish_reason))

    def append(self, position: Position, now: float) -> None:
        """Takes the next position, seen at `now`."""
        if not self.positions:
            self.first_token_s = now
        self.positions.append(position)

    def end(self, reason: str, now: float) -> None:
        """No more positions follow."""
        self.finish_reason, self.finish_s = reason, now


class Ran(NamedTuple):
    """In `step`, tokens [start, start + tokens) of the sequence of `request` were computed."""

    step: int
    request: str
    start: int
    tokens: int


def write_traces(answers: Sequence[Answer], ran: Sequence[Ran] | None) -> Traces:
    """The tables of one work; `ran` None: the engine does not show its steps. Raises EngineError for a lost answer."""
    lost = [answer.request.id for answer in answers if not answer.finish_reason]
    if lost:
        raise EngineError(f"request {lost[0]!r}: the engine never finished it ({len(lost)} of {len(answers)} lost)")
    requests = _request_table(answers)
    steps = None if ran is None else _step_table(answers, ran)
    return Traces(
        requests=requests, positions=_position_table([position for one in answers for position in one.positions]),
        steps=steps, counters=() if steps is None else _counters(requests, steps),
    )  # fmt: skip


def rank(logprobs: Float32, most: int) -> tuple[Int32, Float32]:
    """The `most` best of (V,) log-probabilities: ids and values by value descending, id ascending."""
    if most <= 0:
        return np.empty(0, np.int32), np.empty(0, np.float32)
    least = np.partition(logprobs, -most)[-most] if most < len(logprobs) else -np.inf
    ids = np.flatnonzero(logprobs >= least)
    order = np.lexsort((ids, -logprobs[ids]))[:most]
    return ids[order].astype(np.int32), logprobs[ids[order]]


def _request_table(answers: Sequence[Answer]) -> RequestTable:
    drafted = [answer.drafted for answer in answers]
    known = None if None in drafted or not answers else _int32([count or 0 for count in drafted])
    return RequestTable(
        id=tuple(answer.request.id for answer in answers),
        sample=_int32([0] * len(answers)),
        companion=np.array([answer.arrival.companion for answer in answers], np.bool_),
        prompt_tokens=_int32([len(answer.request.prompt_token_ids) for answer in answers]),
        length=np.array([len(answer.positions) for answer in answers], np.int64),
        finish_reason=tuple(answer.finish_reason for answer in answers),
        cached_tokens=_int32([answer.cached_tokens for answer in answers]),
        preemptions=_int32([0] * len(answers)),
        drafted=known,
        accepted=known,
        rollbacks=None if known is None else _int32([0] * len(answers)),
        arrival_s=np.array([answer.arrival_s for answer in answers], np.float64),
        first_token_s=np.array([answer.first_token_s for answer in answers], np.float64),
        finish_s=np.array([answer.finish_s for answer in answers], np.float64),
    )


def _position_table(positions: Sequence[Position]) -> PositionTable:
    width = max((len(position.ids) for position in positions), default=0)
    ids = np.full((len(positions), width), NO_TOKEN, np.int32)
    values = np.full((len(positions), width), np.nan, np.float32)
    for row, position in enumerate(positions):
        ids[row, : len(position.ids)], values[row, : len(position.ids)] = position.ids, position.values
    return PositionTable(
        token=_int32([position.token for position in positions]),
        pick=_int32([position.pick for position in positions]),
        logprob=np.array([position.logprob for position in positions], np.float32),
        topk_ids=ids,
        topk_logprobs=values,
        logits_digest=_digests([position.digest for position in positions if position.digest], len(positions)),
    )


def _digests(digests: Sequence[bytes], positions: int) -> UInt64 | None:
    """(N, 2), or None if not every position was digested."""
    if not digests or len(digests) != positions:
        return None
    return np.frombuffer(b"".join(digests), "<u8").reshape(-1, 2).astype(np.uint64)


def _step_table(answers: Sequence[Answer], ran: Sequence[Ran]) -> StepTable:
    row_of = {answer.request.id: row for row, answer in enumerate(answers)}
    strange = sorted({one.request for one in ran} - set(row_of))
    if strange:
        raise EngineError(f"the engine ran {strange[0]!r}, which nobody submitted in this work")
    return StepTable(
        step=_int32([one.step for one in ran]),
        request=_int32([row_of[one.request] for one in ran]),
        start=_int32([one.start for one in ran]),
        count=_int32([one.tokens for one in ran]),
    )


def _counters(requests: RequestTable, steps: StepTable) -> tuple[tuple[str, int], ...]:
    _, sizes = np.unique(steps.step, return_counts=True)
    return (
        ("cached_tokens", int(requests.cached_tokens.sum())),
        ("max_running", int(sizes.max()) if len(sizes) else 0),
        ("steps", len(sizes)),
        ("tokens_computed", int(steps.count.sum())),
    )


def _int32(values: Sequence[int]) -> Int32:
    return np.array(values, np.int32)
