"""Traces in columns: what an engine produced for every request and position of one case.

It does not know rules, verdicts or storage. Rules: positions of one request are contiguous and in order; requests
keep the order of submission; floats are kept as float32 and compared by their bits elsewhere, never here.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]
UInt64 = npt.NDArray[np.uint64]
Bool = npt.NDArray[np.bool_]

NO_TOKEN = -1  # pads top-k rows of requests that asked for fewer candidates, and picks an engine cannot report


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RequestTable:
    """One row per (request, sample), R rows. Times are seconds from the case's start; they are never compared."""

    id: tuple[str, ...]
    sample: Int32  # (R,) sample index, 0 unless n > 1
    companion: Bool  # (R,) True: ran beside the judged requests, is not judged
    prompt_tokens: Int32  # (R,)
    length: Int64  # (R,) generated positions
    finish_reason: tuple[str, ...]  # "stop" | "length" | "abort"
    cached_tokens: Int32  # (R,) prompt tokens served from a prefix cache
    preemptions: Int32  # (R,) times the request was preempted and recomputed
    arrival_s: Float64  # (R,)
    first_token_s: Float64  # (R,)
    finish_s: Float64  # (R,)
    drafted: Int32 | None = None  # (R,) proposed tokens that ran; None: the engine does not say
    accepted: Int32 | None = None  # (R,) of these, tokens the engine took itself
    rollbacks: Int32 | None = None  # (R,) steps after which proposed tokens were thrown away
    masked: Int32 | None = None  # (R,) positions sampled under a grammar's mask; None: the engine does not say
    steered: Int32 | None = None  # (R,) of these, positions at which the mask changed the sampler's pick


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PositionTable:
    """One row per generated position, N = sum of lengths; the requests' rows follow each other.

    `pick` is the token the engine's own sampler would have taken (equal to `token` in natural replay). `logprob` and
    `topk_*` are raw float32 log-probabilities, before penalties, masks and temperature; top-k rows are ordered by
    value descending, id ascending, and padded with NO_TOKEN and NaN. `logits_digest` (rule `tensors`) holds the first
    16 bytes of BLAKE2b over each position's float32 logits.
    """

    token: Int32  # (N,)
    pick: Int32  # (N,)
    logprob: Float32 | None  # (N,) None: the engine cannot report logprobs
    topk_ids: Int32 | None  # (N, K)
    topk_logprobs: Float32 | None  # (N, K)
    logits_digest: UInt64 | None  # (N, 2)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepTable:
    """What each engine step computed: row i says that in `step` tokens [start, start + count) of a sequence ran.

    `request` indexes the request table. A sequence is prompt followed by output: the step that computes token p - 1
    yields the logits of the output at position p. Recomputation after preemption shows as rows that overlap.
    None of it is compared; it is the evidence that an axis really varied.
    """

    step: Int32  # (S,) non-decreasing
    request: Int32  # (S,)
    start: Int32  # (S,)
    count: Int32  # (S,)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Traces:
    """Everything one case produced. `counters` are the engine's own claims (for example max_running), as integers."""

    requests: RequestTable
    positions: PositionTable
    steps: StepTable | None  # None: the engine does not show its steps
    counters: tuple[tuple[str, int], ...]
