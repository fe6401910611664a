"""Writes the harness's trace tables from what vLLM answered and its scheduler did. It runs nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from engines.vllm_steps import StepLog
from engines.vllm_work import Served
from harness.errors import EngineError
from harness.traces import NO_TOKEN, Float32, Int32, PositionTable, RequestTable, StepTable, Traces

REASONS = ("stop", "length")
Picks = Mapping[str, Mapping[int, int]]  # vLLM's internal id to position to the sampler's own pick


def write_traces(served: Sequence[Served], steps: StepLog, picks: Picks | None, *, speculative: bool) -> Traces:
    """The tables of one work. `picks` None: tokens were forced by vLLM, and the first candidate would have been picked.

    Raises EngineError for an answer that cannot be written down.
    """
    requests = _request_table(served, steps, speculative=speculative)
    return Traces(
        requests=requests,
        positions=_position_table(served, picks),
        steps=_step_table(served, steps),
        counters=_counters(requests, steps),
    )


def _request_table(served: Sequence[Served], steps: StepLog, *, speculative: bool) -> RequestTable:
    drafted = steps.drafted()
    rows = {entry.internal: sum(_yields(entry, ran.start + ran.tokens) for ran in steps.ran
                                if ran.request == entry.internal) for entry in served}  # fmt: skip
    return RequestTable(
        id=tuple(entry.request.id for entry in served),
        sample=_int32([0] * len(served)),
        companion=np.array([entry.arrival.companion for entry in served], np.bool_),
        prompt_tokens=_int32([len(entry.request.prompt_token_ids) for entry in served]),
        length=np.array([len(entry.tokens) for entry in served], np.int64),
        finish_reason=tuple(_finish_reason(entry) for entry in served),
        cached_tokens=_int32([_cached(entry) for entry in served]),
        preemptions=_int32([steps.resumed.get(entry.internal, 0) for entry in served]),
        drafted=_int32([drafted.get(entry.internal, 0) for entry in served]) if speculative else None,
        accepted=_int32([len(entry.tokens) - rows[entry.internal] for entry in served]) if speculative else None,
        rollbacks=_int32([steps.rollbacks.get(entry.internal, 0) for entry in served]) if speculative else None,
        arrival_s=np.array([entry.arrival_s for entry in served], np.float64),
        first_token_s=np.array([entry.first_token_s for entry in served], np.float64),
        finish_s=np.array([entry.finish_s for entry in served], np.float64),
    )


def _yields(entry: Served, end: int) -> bool:
    """Whether a row that ends at token `end` computed the logits of an output."""
    return end >= len(entry.request.prompt_token_ids)


def _finish_reason(entry: Served) -> str:
    if entry.cancelled:
        return "abort"
    reason = entry.output.outputs[0].finish_reason
    if reason not in REASONS:
        raise EngineError(
            f"request {entry.request.id!r}: vLLM ended it with {reason!r}, expected {' or '.join(REASONS)}"
        )
    return str(reason)


def _cached(entry: Served) -> int:
    return int(entry.output.num_cached_tokens or 0)


def _position_table(served: Sequence[Served], picks: Picks | None) -> PositionTable:
    tokens = [token for entry in served for token in entry.tokens]
    ids, logprobs = _top_k(served, len(tokens))
    return PositionTable(
        token=_int32(tokens),
        pick=_int32(_all_picks(served, picks, ids)),
        logprob=np.array([_chosen(entry, p) for entry in served for p in range(len(entry.tokens))], np.float32),
        topk_ids=ids,
        topk_logprobs=logprobs,
        logits_digest=None,
    )


def _all_picks(served: Sequence[Served], picks: Picks | None, top: Int32) -> list[int]:
    if picks is None:
        return [int(row[0]) for row in top]
    return [pick for entry in served for pick in _picks(entry, picks.get(entry.internal))]


def _picks(entry: Served, own: Mapping[int, int] | None) -> list[int]:
    """The sampler's picks: its tokens unless they were forced; a forced position without one is reported as such."""
    if own is None:
        return entry.tokens
    return [own.get(position, NO_TOKEN) for position in range(len(entry.tokens))]


def _candidates(entry: Served, position: int) -> Mapping[int, Any]:
    """Token to vLLM's Logprob at a position: the emitted token and the top candidates."""
    reported = entry.output.outputs[0].logprobs
    if reported is None or len(reported) <= position:
        raise EngineError(f"request {entry.request.id!r} position {position}: vLLM reports no logprobs")
    found: Mapping[int, Any] = reported[position]
    return found


def _chosen(entry: Served, position: int) -> float:
    token = entry.tokens[position]
    candidates = _candidates(entry, position)
    if token not in candidates:
        raise EngineError(f"request {entry.request.id!r} position {position}: vLLM reports no logprob of token {token}")
    return float(candidates[token].logprob)


def _top_k(served: Sequence[Served], positions: int) -> tuple[Int32, Float32]:
    """(N, K) ids and logprobs by value descending, id ascending; K the widest row, padded with NO_TOKEN and NaN."""
    width = max((entry.request.sampling.logprobs for entry in served), default=0)
    ids = np.full((positions, width), NO_TOKEN, np.int32)
    logprobs = np.full((positions, width), np.nan, np.float32)
    row = 0
    for entry in served:
        for position in range(len(entry.tokens)):
            ranked = sorted((-value.logprob, token) for token, value in _candidates(entry, position).items())
            for column, (negated, token) in enumerate(ranked[: entry.request.sampling.logprobs]):
                ids[row, column], logprobs[row, column] = token, -negated
            row += 1
    return ids, logprobs


def _step_table(served: Sequence[Served], steps: StepLog) -> StepTable:
    row_of = {entry.internal: row for row, entry in enumerate(served)}
    strange = sorted({ran.request for ran in steps.ran} - set(row_of))
    if strange:
        raise EngineError(f"vLLM's scheduler ran {strange[0]!r}, which nobody submitted in this work")
    return StepTable(
        step=_int32([ran.step for ran in steps.ran]),
        request=_int32([row_of[ran.request] for ran in steps.ran]),
        start=_int32([ran.start for ran in steps.ran]),
        count=_int32([ran.tokens for ran in steps.ran]),
    )


def _counters(requests: RequestTable, steps: StepLog) -> tuple[tuple[str, int], ...]:
    sizes: dict[int, int] = {}
    for ran in steps.ran:
        sizes[ran.step] = sizes.get(ran.step, 0) + 1
    counters = {
        "cached_tokens": int(requests.cached_tokens.sum()),
        "max_running": max(sizes.values(), default=0),
        "preemptions": int(requests.preemptions.sum()),
        "steps": steps.steps,
        "tokens_computed": sum(ran.tokens for ran in steps.ran),
    }
    return tuple(sorted(counters.items()))


def _int32(values: list[int]) -> Int32:
    return np.array(values, np.int32)
