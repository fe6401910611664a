"""The fake engine's "model": logits and draws by hashing, no weights, no torch.

It does not know schedules or faults. Rules: the logits of a position are a function of the tokens before it and of
nothing else, unless a taint is passed in; everything is integer arithmetic until the last rounding, so that the bits
are the same on every machine and for every batch.

A token's logit is q / 8192 with q a 16-bit hash, from 0 to 8. Ties happen (about one position in 250), as in life.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Sequence
from functools import cache

import numpy as np
import numpy.typing as npt

from engines.fake_names import EOS, VOCAB
from harness.request import MAX_TOP_LOGPROBS, Sampling
from harness.traces import Float32, Float64, Int64, UInt64

DEFINITION = 1  # another number means other bits
MASK = 2**64 - 1
_SCALE = 8192.0
_UNIT = 2**40  # weight of the largest logit; VOCAB of them stay below 2**63
_IDS = np.arange(VOCAB, dtype=np.uint64)


def absorb(state: int, token: int) -> int:
    """The state of a sequence after one more token."""
    return mix(state ^ ((token + 1) * 0x9E3779B97F4A7C15 & MASK))


def mix(x: int) -> int:
    """SplitMix64's finaliser on one integer."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & MASK
    return x ^ (x >> 31)


def hash_logits(states: Sequence[int], taints: Sequence[int]) -> Int64:
    """q of every token after each state, (W, VOCAB). A taint other than 0 moves every q by up to 128."""
    state = np.array(states, dtype=np.uint64)[:, None]
    q = (_mix(state + _IDS * np.uint64(0xD6E8FEB86659FD93)) >> np.uint64(48)).astype(np.int64)
    taint = np.array(taints, dtype=np.uint64)[:, None]
    if taint.any():
        moved = (_mix(taint ^ (q.astype(np.uint64) + _IDS)) >> np.uint64(56)).astype(np.int64) - 128
        q = np.clip(q + np.where(taint == 0, 0, moved), 0, 65_535)
    return q


def log_softmax(q: Int64) -> Float32:
    """Raw log-probabilities (W, VOCAB): one exact integer sum and one rounding to float32."""
    totals = _weights()[q].sum(axis=1)
    logs = np.array([math.log(total / _UNIT) + 8.0 for total in totals.tolist()])
    values: Float32 = (q / _SCALE - logs[:, None]).astype(np.float32)
    return values


def rank(q: Int64) -> Int64:
    """The MAX_TOP_LOGPROBS best ids of each row, value descending, id ascending."""
    keys = q * 512 + (511 - np.arange(VOCAB))
    best: Int64 = np.argsort(-keys, axis=1)[:, :MAX_TOP_LOGPROBS]
    return best


def digest_logits(q: Int64) -> UInt64:
    """First 16 bytes of BLAKE2b over each row's float32 logits, (W, 2)."""
    rows = (q / _SCALE).astype("<f4")
    data = b"".join(hashlib.blake2b(row.tobytes(), digest_size=16).digest() for row in rows)
    return np.frombuffer(data, "<u8").reshape(-1, 2).astype(np.uint64)


def pick(q: Int64, sampling: Sampling, prompt: Sequence[int], output: Sequence[int], sample: int) -> int:
    """The token that is drawn from one row of q, (VOCAB,), in the order of docs/numerics.md."""
    x = _penalised(q / _SCALE, sampling, prompt, output)
    if sampling.temperature == 0:
        return int(np.argmax(x))
    order = np.argsort(-x, kind="stable")
    order = order[np.isfinite(x[order])]
    weights = np.exp((x[order] - x[order[0]]) / sampling.temperature)
    weights = weights[: _survivors(weights, sampling)]
    sums = np.cumsum(weights)
    u = (mix(absorb(absorb(sampling.seed or 0, len(prompt) + len(output)), sample)) >> 40) * 2.0**-24
    drawn = int(np.searchsorted(sums, u * sums[-1], side="right"))
    return int(order[min(drawn, len(weights) - 1)])


def _penalised(x: Float64, sampling: Sampling, prompt: Sequence[int], output: Sequence[int]) -> Float64:
    if sampling.repetition_penalty != 1:
        seen = np.array(sorted({*prompt, *output}))
        x[seen] = np.where(x[seen] > 0, x[seen] / sampling.repetition_penalty, x[seen] * sampling.repetition_penalty)
    if sampling.frequency_penalty or sampling.presence_penalty:
        for token, count in sorted(Counter(output).items()):
            x[token] -= count * sampling.frequency_penalty + sampling.presence_penalty
    for token, bias in sampling.logit_bias:
        x[token] += bias
    if len(output) < sampling.min_tokens:
        x[[EOS, *sampling.stop_token_ids]] = -np.inf
    return x


def _survivors(weights: Float64, sampling: Sampling) -> int:
    """How many of the sorted candidates top-k, top-p and min-p leave."""
    count = min(len(weights), sampling.top_k or len(weights))
    if sampling.top_p < 1:
        sums = np.cumsum(weights[:count])
        count = min(count, int(np.searchsorted(sums, sampling.top_p * sums[-1])) + 1)
    return max(1, min(count, int((weights[:count] >= sampling.min_p * weights[0]).sum())))


def _mix(x: UInt64) -> UInt64:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@cache
def _weights() -> npt.NDArray[np.int64]:
    """exp of every logit as an integer in units of exp(8) / 2**40, (65536,)."""
    return np.array([round(math.exp(q / _SCALE - 8.0) * _UNIT) for q in range(65_536)], dtype=np.int64)
