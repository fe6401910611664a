"""The fake engine's loop: arrivals, continuous batching, chunked prefill, and an honest record of every step.

It does not know faults. Rules: sequences that run come first, in the order of admission; a prompt longer than the
tokens left in a step is cut; a step runs a sequence once; requests keep the order of their arrival in the traces.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from engines.arrivals import Arrivals, Standing
from engines.fake_model import absorb, digest_logits, hash_logits, log_softmax, pick, rank
from engines.fake_names import CONTEXT, EOS
from harness.engine import Progress, Work
from harness.errors import EngineError, Unsupported
from harness.request import Request
from harness.schedule import Arrival
from harness.traces import NO_TOKEN, Float32, Int32, PositionTable, RequestTable, StepTable, Traces, UInt64


class Limits(NamedTuple):
    """How steps are filled, and what taints results: `salt` is None where bits follow the request alone."""

    seats: int
    tokens: int
    salt: int | None


class Position(NamedTuple):
    """What is reported of one generated position."""

    token: int
    pick: int
    logprob: Float32  # ()
    ids: Int32  # (k,)
    values: Float32  # (k,)
    digest: UInt64 | None  # (2,)


@dataclass(frozen=True, slots=True)
class Slice:
    """Tokens [start, start + count) of a sequence, run in one step."""

    sequence: Sequence
    start: int
    count: int


@dataclass(slots=True, kw_only=True, eq=False)
class Sequence:
    """One sample of a request under way. `state` hashes the computed tokens, `taint` the company they ran in."""

    request: Request
    sample: int
    companion: bool
    forced: tuple[int, ...] | None
    row: int
    arrival_s: float
    tokens: list[int]
    computed: int = 0
    state: int = 0
    taint: int = 0
    positions: list[Position] = field(default_factory=list)
    finish_reason: str | None = None
    first_token_s: float = 0.0
    finish_s: float = 0.0

    @property
    def output(self) -> list[int]:
        """The tokens generated so far."""
        return self.tokens[len(self.request.prompt_token_ids) :]


StepHook = Callable[[list[Sequence]], None]  # called after each step with every sequence submitted so far


class Loop:
    """Runs one work."""

    def __init__(self, work: Work, limits: Limits, progress: Progress, after_step: StepHook) -> None:
        self.work, self.limits, self.progress, self.after_step = work, limits, progress, after_step
        self.requests = {request.id: request for request in work.requests}
        if len(self.requests) != len(work.requests):
            raise EngineError("two requests have the same id; every id must occur once")
        for request in work.requests:
            check_request(request, work.golden.get(request.id))
        self.arrivals = Arrivals(work.schedule, self.requests)
        self.sequences: list[Sequence] = []
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.log: list[tuple[int, int, int, int]] = []  # step, row, start, count
        self.step = 0
        self.began = time.monotonic()

    def run(self) -> Traces:
        """All steps to the end. Raises EngineError for a schedule that can never complete."""
        while self.arrivals.pending or self.waiting or self.running:
            self._admit_arrivals()
            if not (self.waiting or self.running):
                self.step = max(self.step, self.arrivals.next_step())
                continue
            self.run_step()
        return self.traces()

    def run_step(self) -> int:
        """One step over what waits and runs; returns the tokens it computed."""
        slices = self._fill_step()
        self._run_step(slices)
        self.step += 1
        self.after_step(self.sequences)
        return sum(piece.count for piece in slices)

    def traces(self) -> Traces:
        """The tables of what ran."""
        return write_traces(self.sequences, self.log)

    def admit(self, arrival: Arrival) -> None:
        """Puts a request's samples in line."""
        request = self.requests[arrival.request]
        forced = self.work.golden.get(request.id) if self.work.replay == "golden" else None
        for sample in range(request.sampling.n):
            sequence = Sequence(
                request=request, sample=sample, companion=arrival.companion, forced=forced,
                row=len(self.sequences), arrival_s=self._now(), tokens=list(request.prompt_token_ids),
            )  # fmt: skip
            self.sequences.append(sequence)
            self.waiting.append(sequence)

    def _admit_arrivals(self) -> None:
        for arrival in self.arrivals.take_due(self.step, self._standings()):
            self.admit(arrival)

    def _standings(self) -> Mapping[str, Standing]:
        standings: dict[str, Standing] = {}
        for sequence in self.sequences:
            now = Standing(generated=len(sequence.positions), finished=sequence.finish_reason is not None)
            name = sequence.request.id
            before = standings.get(name, now)
            standings[name] = Standing(
                generated=min(now.generated, before.generated), finished=now.finished and before.finished
            )
        return standings

    def _fill_step(self) -> list[Slice]:
        budget = self.limits.tokens
        slices: list[Slice] = []
        while self.waiting and len(self.running) < self.limits.seats:
            self.running.append(self.waiting.pop(0))
        for sequence in self.running:
            count = min(len(sequence.tokens) - sequence.computed, budget)
            if count:
                slices.append(Slice(sequence, sequence.computed, count))
                budget -= count
        return slices

    def _run_step(self, slices: list[Slice]) -> None:
        self.log += [(self.step, piece.sequence.row, piece.start, piece.count) for piece in slices]
        for piece in slices:
            self._compute(piece, slices)
        done = [piece.sequence for piece in slices if piece.sequence.computed == len(piece.sequence.tokens)]
        if done:
            positions = generate_positions(done, digests=self.work.logits_digests)
            for sequence, position in zip(done, positions, strict=True):
                self._append(sequence, position)
        self.running = [sequence for sequence in self.running if sequence.finish_reason is None]
        finished = sum(sequence.finish_reason is not None for sequence in self.sequences)
        self.progress(finished, sum(len(sequence.positions) for sequence in self.sequences))

    def _compute(self, piece: Slice, slices: list[Slice]) -> None:
        sequence = piece.sequence
        for token in sequence.tokens[piece.start : piece.start + piece.count]:
            sequence.state = absorb(sequence.state, token)
        sequence.computed += piece.count
        if self.limits.salt is not None:
            longest = max(other.start + other.count for other in slices)
            company = (len(slices), sum(other.count for other in slices), longest, piece.count, self.limits.salt)
            for number in company:
                sequence.taint = absorb(sequence.taint, number)

    def _append(self, sequence: Sequence, position: Position) -> None:
        if not sequence.positions:
            sequence.first_token_s = self._now()
        sequence.positions.append(position)
        sequence.tokens.append(position.token)
        sequence.finish_reason = finish_reason(sequence)
        if sequence.finish_reason is not None:
            sequence.finish_s = self._now()

    def _now(self) -> float:
        return time.monotonic() - self.began


def check_request(request: Request, forced: tuple[int, ...] | None) -> None:
    """Raises Unsupported or EngineError, naming the request, for what cannot be run as written."""
    if request.grammar is not None or request.images:
        raise Unsupported(f"request {request.id!r}: the fake engine has neither grammars nor images")
    if forced is not None and request.sampling.n > 1:
        raise Unsupported(f"request {request.id!r}: golden replay of several samples")
    if not request.prompt_token_ids or not all(0 <= token <= EOS for token in request.prompt_token_ids):
        raise EngineError(f"request {request.id!r}: expected at least one token id, each from 0 to {EOS}")
    most = len(request.prompt_token_ids) + request.sampling.max_tokens
    if most > CONTEXT:
        raise EngineError(f"request {request.id!r}: prompt and output of {most} tokens exceed the context of {CONTEXT}")


def generate_positions(sequences: list[Sequence], *, digests: bool) -> list[Position]:
    """The next position of every sequence, in one batch."""
    q = hash_logits([s.state for s in sequences], [s.taint for s in sequences])
    logprobs, best = log_softmax(q), rank(q)
    digested = list(digest_logits(q)) if digests else [None] * len(sequences)
    positions = []
    for sequence, row, values, ids, digest in zip(sequences, q, logprobs, best, digested, strict=True):
        request, index = sequence.request, len(sequence.positions)
        drawn = pick(row, request.sampling, request.prompt_token_ids, sequence.output, sequence.sample)
        token = drawn if sequence.forced is None else sequence.forced[index]
        kept = ids[: request.sampling.logprobs].astype(np.int32)
        positions.append(Position(token, drawn, values[token], kept, values[kept], digest))
    return positions


def finish_reason(sequence: Sequence) -> str | None:
    """Why the sequence ends after its newest token, or None. A forced path ends where it ends."""
    sampling, output = sequence.request.sampling, sequence.output
    if sequence.forced is not None and len(output) < len(sequence.forced):
        return None
    if len(output) >= sampling.min_tokens:
        if output[-1] in sampling.stop_token_ids or (output[-1] == EOS and not sampling.ignore_eos):
            return "stop"
        text = bytes(token for token in output if token != EOS).decode(errors="replace") if sampling.stop else ""
        if any(text.endswith(stop) for stop in sampling.stop):
            return "stop"
    ended = len(output) >= sampling.max_tokens or sequence.forced is not None
    return "length" if ended else None


def write_traces(sequences: list[Sequence], log: list[tuple[int, int, int, int]]) -> Traces:
    """The trace tables, with counters that count what was logged."""
    steps = np.array(log, dtype=np.int32).reshape(-1, 4)
    running = np.bincount(steps[:, 0]) if len(steps) else np.zeros(1, dtype=np.int64)
    return Traces(
        requests=_request_table(sequences),
        positions=_position_table([position for sequence in sequences for position in sequence.positions]),
        steps=StepTable(step=steps[:, 0].copy(), request=steps[:, 1].copy(), start=steps[:, 2].copy(),
                        count=steps[:, 3].copy()),
        counters=(
            ("max_running", int(running.max())), ("preemptions", 0), ("steps", int((running > 0).sum())),
            ("tokens_computed", int(steps[:, 3].sum())),
        ),
    )  # fmt: skip


def _request_table(sequences: list[Sequence]) -> RequestTable:
    none = np.zeros(len(sequences), dtype=np.int32)
    return RequestTable(
        id=tuple(sequence.request.id for sequence in sequences),
        sample=np.array([sequence.sample for sequence in sequences], dtype=np.int32),
        companion=np.array([sequence.companion for sequence in sequences], dtype=np.bool_),
        prompt_tokens=np.array([len(s.request.prompt_token_ids) for s in sequences], dtype=np.int32),
        length=np.array([len(sequence.positions) for sequence in sequences], dtype=np.int64),
        finish_reason=tuple(sequence.finish_reason or "abort" for sequence in sequences),
        cached_tokens=none,
        preemptions=none.copy(),
        arrival_s=np.array([sequence.arrival_s for sequence in sequences]),
        first_token_s=np.array([sequence.first_token_s for sequence in sequences]),
        finish_s=np.array([sequence.finish_s for sequence in sequences]),
    )


def _position_table(positions: list[Position]) -> PositionTable:
    width = max((len(position.ids) for position in positions), default=0)
    ids = np.full((len(positions), width), NO_TOKEN, dtype=np.int32)
    values = np.full((len(positions), width), np.nan, dtype=np.float32)
    for row, position in enumerate(positions):
        ids[row, : len(position.ids)], values[row, : len(position.ids)] = position.ids, position.values
    return PositionTable(
        token=np.array([position.token for position in positions], dtype=np.int32),
        pick=np.array([position.pick for position in positions], dtype=np.int32),
        logprob=np.array([position.logprob for position in positions], dtype=np.float32),
        topk_ids=ids,
        topk_logprobs=values,
        logits_digest=_digest_column([position.digest for position in positions]),
    )


def _digest_column(digests: list[UInt64 | None]) -> UInt64 | None:
    known = [digest for digest in digests if digest is not None]
    return np.stack(known) if known and len(known) == len(digests) else None
