"""How well two computations of the same tokens' logprobs agree: what a trainer asks of its sampler. Pure.

It does not know verdicts: a comparison decides by bits, this measures. Rules: only tokens that both sides were
forced along or chose alike are used; differences are taken in float64; equal means equal bits; what cannot be measured
is None.

With d = the variant's minus the reference's logprob of a token: k1 is the mean of -d and k3 the mean of exp(d) - 1 - d
(Schulman, "Approximating KL Divergence", 2020), estimates of KL(reference || variant) for tokens drawn from the
reference; the perplexity ratio is exp(k1), the variant's perplexity over the reference's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from harness.judged import ComparisonError, Judged, align

if TYPE_CHECKING:
    from harness.traces import Float32, Float64, Int32, Int64, Traces

AXES = ("scoring", "trainer")  # axes on which both arms compute logprobs of the same text in another way


@dataclass(frozen=True, slots=True, kw_only=True)
class PositionAgreement:
    """All requests' n-th output token: absolute differences in nats."""

    position: int
    tokens: int
    mean: float
    most: float


@dataclass(frozen=True, slots=True, kw_only=True)
class AgreementResult:
    """Over all tokens both arms have; `equal` of them have the same bits. Differences are in nats."""

    tokens: int
    equal: int
    kl_k1: float
    kl_k3: float
    max_delta: float
    mean_delta: float
    perplexity_ratio: float
    pearson: float | None  # None: one side does not vary
    by_position: tuple[PositionAgreement, ...]


def measure_agreement(reference: Traces, variant: Traces) -> AgreementResult | None:
    """None where a side has no logprobs, or some are not finite. Raises ComparisonError: other requests, no token."""
    alignment = align(reference, variant)
    if reference.positions.logprob is None or variant.positions.logprob is None:
        return None
    at, here, there = _rows(alignment.reference, alignment.variant)
    same = reference.positions.token[here] == variant.positions.token[there]
    at, a, b = at[same], reference.positions.logprob[here[same]], variant.positions.logprob[there[same]]
    if not len(a):
        raise ComparisonError("no token has a logprob on both sides")
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        return None
    return _measure(at, a, b)


def _rows(reference: Judged, variant: Judged) -> tuple[Int64, Int64, Int64]:
    """(output position, row of the reference's table, row of the variant's) of every position both sides have."""
    lengths = np.minimum(reference.lengths, variant.lengths)
    at = np.concatenate([np.arange(length, dtype=np.int64) for length in lengths])
    return at, np.repeat(reference.starts, lengths) + at, np.repeat(variant.starts, lengths) + at


def _measure(at: Int64, a: Float32, b: Float32) -> AgreementResult:
    d = b.astype(np.float64) - a.astype(np.float64)
    bits: Int32 = a.view(np.int32) ^ b.view(np.int32)
    k1 = float(-d.mean()) + 0.0
    return AgreementResult(
        tokens=len(d), equal=int((bits == 0).sum()), kl_k1=k1, kl_k3=float((np.expm1(d) - d).mean()),
        max_delta=float(np.abs(d).max()), mean_delta=float(np.abs(d).mean()), perplexity_ratio=math.exp(k1),
        pearson=_pearson(a.astype(np.float64), b.astype(np.float64)), by_position=_by_position(at, np.abs(d)),
    )  # fmt: skip


def _pearson(a: Float64, b: Float64) -> float | None:
    a, b = a - a.mean(), b - b.mean()
    size = math.sqrt(float(a @ a) * float(b @ b))
    return min(1.0, float(a @ b) / size) if size > 0 else None


def _by_position(at: Int64, distance: Float64) -> tuple[PositionAgreement, ...]:
    counts = np.bincount(at)
    most = np.zeros(len(counts))
    np.maximum.at(most, at, distance)
    sums = np.bincount(at, weights=distance)
    return tuple(
        PositionAgreement(position=place, tokens=int(n), mean=float(total / n), most=float(largest))
        for place, (n, total, largest) in enumerate(zip(counts, sums, most, strict=True))
        if n
    )
