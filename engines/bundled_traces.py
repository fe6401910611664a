"""Writes the harness's trace tables from finished sequences and the engine's step log. It runs nothing."""

from __future__ import annotations

from collections.abc import Sequence as Rows
from typing import NamedTuple

import numpy as np

from engines.bundled.batch import Ranked
from engines.bundled.engine import Engine
from engines.bundled.sequence import Position, Sequence
from harness.traces import NO_TOKEN, Float32, Int32, PositionTable, RequestTable, StepTable, Traces, UInt64


class Row(NamedTuple):
    """One finished sequence with its times in seconds."""

    sequence: Sequence
    companion: bool
    arrival_s: float
    first_token_s: float
    finish_s: float


def write_traces(engine: Engine, rows: Rows[Row]) -> Traces:
    """The tables of one work; `rows` in the order in which requests are to appear."""
    sequences = [row.sequence for row in rows]
    return Traces(
        requests=_request_table(rows),
        positions=_position_table(
            [position for sequence in sequences for position in sequence.positions],
            silent=engine.config.observer == "none",
        ),
        steps=_step_table(engine, sequences),
        counters=_counters(engine, sequences),
    )


def _request_table(rows: Rows[Row]) -> RequestTable:
    sequences = [row.sequence for row in rows]
    return RequestTable(
        id=tuple(sequence.request.id for sequence in sequences),
        sample=_int32([sequence.request.sample for sequence in sequences]),
        companion=np.array([row.companion for row in rows], np.bool_),
        prompt_tokens=_int32([len(sequence.request.prompt) for sequence in sequences]),
        length=np.array([sequence.generated for sequence in sequences], np.int64),
        finish_reason=tuple(sequence.finish_reason or "abort" for sequence in sequences),
        cached_tokens=_int32([sequence.cached_tokens for sequence in sequences]),
        preemptions=_int32([sequence.preemptions for sequence in sequences]),
        drafted=_int32([sequence.drafted for sequence in sequences]),
        accepted=_int32([sequence.accepted for sequence in sequences]),
        rollbacks=_int32([sequence.rollbacks for sequence in sequences]),
        masked=_int32([sequence.masked for sequence in sequences]),
        steered=_int32([sequence.steered for sequence in sequences]),
        arrival_s=np.array([row.arrival_s for row in rows], np.float64),
        first_token_s=np.array([row.first_token_s for row in rows], np.float64),
        finish_s=np.array([row.finish_s for row in rows], np.float64),
    )


def _position_table(positions: list[Position], *, silent: bool) -> PositionTable:
    ids, logprobs = _top_k(positions)
    return PositionTable(
        token=_int32([position.token for position in positions]),
        pick=_int32([position.pick for position in positions]),
        logprob=None if silent else np.array([position.logprob for position in positions], np.float32),
        topk_ids=None if silent else ids,
        topk_logprobs=None if silent else logprobs,
        logits_digest=_digests(positions),
    )


def _top_k(positions: list[Position]) -> tuple[Int32, Float32]:
    """(N, K) ids and logprobs, K the widest row, padded with NO_TOKEN and NaN."""
    width = max((len(position.topk_ids) for position in positions), default=0)
    ids = np.full((len(positions), width), NO_TOKEN, np.int32)
    logprobs = np.full((len(positions), width), np.nan, np.float32)
    for row, position in enumerate(positions):
        ids[row, : len(position.topk_ids)] = position.topk_ids
        logprobs[row, : len(position.topk_ids)] = position.topk_logprobs
    return ids, logprobs


def _digests(positions: list[Position]) -> UInt64 | None:
    """(N, 2), or None if not every position was digested."""
    digests = [position.digest for position in positions if position.digest is not None]
    if len(digests) != len(positions):
        return None
    return np.frombuffer(b"".join(digests), "<u8").reshape(-1, 2).astype(np.uint64)


def _step_table(engine: Engine, sequences: list[Sequence]) -> StepTable:
    row_of = {id(sequence): row for row, sequence in enumerate(sequences)}
    return StepTable(
        step=_int32([ran.step for ran in engine.log]),
        request=_int32([row_of[id(ran.sequence)] for ran in engine.log]),
        start=_int32([ran.start for ran in engine.log]),
        count=_int32([ran.count for ran in engine.log]),
    )


def _counters(engine: Engine, sequences: list[Sequence]) -> tuple[tuple[str, int], ...]:
    ahead = engine.ahead
    counters = {
        "cached_tokens": sum(sequence.cached_tokens for sequence in sequences),
        "restored_tokens": sum(sequence.restored_tokens for sequence in sequences),
        "overlapped_steps": ahead.overlapped_steps if ahead else 0,
        "overlap_us": ahead.overlap_ns // 1000 if ahead else 0,
        "masked": sum(sequence.masked for sequence in sequences),
        "max_running": engine.most_running,
        "preemptions": engine.scheduler.preemptions,
        "gave_way": engine.scheduler.gave_way,
        "fast_tokens": engine.fast.tokens if engine.fast else 0,
        "steered": sum(sequence.steered for sequence in sequences),
        "steps": len({ran.step for ran in engine.log}),
        "tokens_computed": sum(ran.count for ran in engine.log),
    }
    if isinstance(engine.arithmetic, Ranked):
        for rank, counts in enumerate(engine.arithmetic.counts()):
            counters |= {f"rank{rank}_{name}": counts[name] for name in ("weight_bytes", "kv_bytes")}
    return tuple(sorted(counters.items()))


def _int32(values: list[int]) -> Int32:
    return np.array(values, np.int32)
