"""Describes a difference: where it began, how large it is, and whether the first flip was a close call.

It does not know rules or verdicts and decides nothing: `harness.compare` decides by bits, this module measures.
Rules: sizes are ulp of float32 and nats; only logprobs of the same token are subtracted; what cannot be measured is
None or counted apart, never zero.

The KL numbers are estimates from the chosen tokens alone, not the divergence of the full distributions. With d =
variant's minus reference's logprob of the chosen token, k1 is the mean of -d and k3 the mean of exp(d) - 1 - d
(Schulman, "Approximating KL Divergence", 2020). They estimate KL(reference || variant) for tokens sampled from the
reference's raw distribution; greedy and filtered requests bias them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from harness.compare.fields import FieldName
from harness.compare.pairs import Pairs, candidate_pairs, chosen_pairs, find_places, join_pairs, ulp_distance
from harness.judged import Alignment, RequestKey
from harness.traces import NO_TOKEN, Float64, Int64, PositionTable, Traces
from harness.values import show_value

TieClass = Literal["tie", "near tie", "confident flip", "unknown"]
TIE_CLASSES: tuple[TieClass, ...] = ("tie", "near tie", "confident flip", "unknown")

# A flip at gap 0 is decided by the sampler's rule for ties, not by the model.
TIE_GAP = 0.0
# Gap in nats up to which a flip is a close call. bfloat16 has 8 significant bits, so logits between 16 and 32 lie
# 0.125 apart and one rounding on each of two candidates closes 0.25; logprobs of bfloat16 engines were measured to
# move by up to 0.2 before sequences part. float32 noise is 1e-5 to 1e-4: the gap is always reported beside the class.
NEAR_TIE_GAP = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class Flip:
    """A position at which the two sides chose differently. `gap`: the reference's top-1/top-2 distance in nats."""

    key: RequestKey
    position: int
    reference_id: int
    variant_id: int
    gap: float | None
    tie: TieClass


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """The first differing position of the first differing request, in the reference's order of requests.

    `reference` and `variant` show the values of the first differing field, floats with their bits. `max_ulp` and
    `max_delta` (absolute, nats) are over the chosen logprob and the candidates both sides list there, None when there
    is nothing to subtract. `gap` is the reference's top-1/top-2 distance there, and `tie` its class.
    """

    key: RequestKey
    position: int  # counted from the request's first output token
    fields: tuple[FieldName, ...]
    reference: str
    variant: str
    max_ulp: int | None
    max_delta: float | None
    gap: float | None
    tie: TieClass

    @property
    def field(self) -> FieldName:
        """The first of the fields, in the order in which they are compared."""
        return self.fields[0]

    @property
    def request(self) -> str:
        """The request's id."""
        return self.key.id

    @property
    def sample(self) -> int:
        """The request's sample index."""
        return self.key.sample


@dataclass(frozen=True, slots=True, kw_only=True)
class Magnitude:
    """Sizes over all differing positions; None where there was nothing to measure.

    `pairs` counts the pairs of values of one token that differ and could be subtracted, `not_finite` those of which one
    is a NaN or an infinity.
    `kl_positions` is how many positions the KL estimates average over, equal ones included.
    """

    max_ulp: int | None
    max_delta: float | None
    pairs: int
    not_finite: int
    kl_k1: float | None
    kl_k3: float | None
    kl_positions: int
    flips: tuple[tuple[TieClass, int], ...]
    first_flip: Flip | None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Evidence:
    """Two aligned captures and the numbers, in the reference's judged layout, at which they differ.

    `flips` are those at which the choice differs (`choice`: the column that holds it). `kl_positions` is how many
    positions had their chosen logprobs compared; 0 leaves the KL out.
    """

    reference: Traces
    variant: Traces
    alignment: Alignment
    choice: Literal["token", "pick"]
    different: Int64  # (D,)
    flips: Int64  # (F,)
    kl_positions: int


def measure(evidence: Evidence) -> Magnitude:
    """Sizes over all differing positions."""
    a, b = evidence.reference.positions, evidence.variant.positions
    places = find_places(evidence.alignment, evidence.different)
    chosen = chosen_pairs(a, b, places)
    pairs = join_pairs([chosen, candidate_pairs(a, b, places)])
    finite = pairs.only_finite()
    ulp, delta = _largest(finite)
    k1, k3 = estimate_kl(chosen, evidence.kl_positions)
    gaps = reference_gaps(a, find_places(evidence.alignment, evidence.flips).reference)
    return Magnitude(
        max_ulp=ulp,
        max_delta=delta,
        pairs=len(finite.reference),
        not_finite=len(pairs.reference) - len(finite.reference),
        kl_k1=k1,
        kl_k3=k3,
        kl_positions=evidence.kl_positions,
        flips=count_flips(gaps),
        first_flip=_first_flip(evidence, gaps),
    )


def describe(evidence: Evidence, j: int, position: int, fields: tuple[FieldName, ...]) -> Divergence:
    """The divergence of request j of the alignment at a position, which may lie past a side's end."""
    alignment = evidence.alignment
    ulp = delta = gap = None
    if position < min(alignment.reference.lengths[j], alignment.variant.lengths[j]):
        places = find_places(alignment, np.array([alignment.reference.offsets[j] + position], dtype=np.int64))
        a, b = evidence.reference.positions, evidence.variant.positions
        pairs = join_pairs([chosen_pairs(a, b, places), candidate_pairs(a, b, places)])
        ulp, delta = _largest(pairs.only_finite())
        gap = _known(reference_gaps(a, places.reference)[0])
    return Divergence(
        key=alignment.keys[j],
        position=position,
        fields=fields,
        reference=show_value(evidence.reference, alignment.reference, j, position, fields[0]),
        variant=show_value(evidence.variant, alignment.variant, j, position, fields[0]),
        max_ulp=ulp,
        max_delta=delta,
        gap=gap,
        tie=tie_class(gap),
    )


def estimate_kl(chosen: Pairs, positions: int) -> tuple[float | None, float | None]:
    """k1 and k3 over `positions`, of which all but the given pairs contribute exactly 0; None if one is not finite."""
    finite = chosen.only_finite()
    if not positions or finite.compared != chosen.compared:
        return None, None
    d = finite.deltas()
    return float(-d.sum() / positions) + 0.0, float((np.expm1(d) - d).sum() / positions)


def tie_class(gap: float | None) -> TieClass:
    """What a flip at this gap of the reference's two best candidates was."""
    if gap is None or np.isnan(gap):
        return "unknown"
    if gap <= TIE_GAP:
        return "tie"
    return "near tie" if gap <= NEAR_TIE_GAP else "confident flip"


def reference_gaps(table: PositionTable, rows: Int64) -> Float64:
    """Top-1/top-2 distance in nats at rows of a position table, (D,); NaN where fewer than two are listed."""
    if table.topk_ids is None or table.topk_logprobs is None or table.topk_ids.shape[1] < 2:
        return np.full(len(rows), np.nan)
    best = table.topk_logprobs[rows, :2].astype(np.float64)
    listed = table.topk_ids[rows, 1] != NO_TOKEN
    with np.errstate(invalid="ignore"):
        gaps: Float64 = np.where(listed, best[:, 0] - best[:, 1], np.nan)
    return gaps


def count_flips(gaps: Float64) -> tuple[tuple[TieClass, int], ...]:
    """How many flips were of which class, every class named."""
    unknown = int(np.isnan(gaps).sum())
    ties = int((gaps <= TIE_GAP).sum())
    close = int((gaps <= NEAR_TIE_GAP).sum())
    counts = (ties, close - ties, len(gaps) - unknown - close, unknown)
    return tuple(zip(TIE_CLASSES, counts, strict=True))


def _first_flip(evidence: Evidence, gaps: Float64) -> Flip | None:
    if not len(evidence.flips):
        return None
    j, position = evidence.alignment.reference.locate(int(evidence.flips[0]))
    a, b = _choice(evidence, "reference", j, position), _choice(evidence, "variant", j, position)
    gap, key = _known(gaps[0]), evidence.alignment.keys[j]
    return Flip(key=key, position=position, reference_id=a, variant_id=b, gap=gap, tie=tie_class(gap))


def _choice(evidence: Evidence, side: Literal["reference", "variant"], j: int, position: int) -> int:
    is_reference = side == "reference"
    judged = evidence.alignment.reference if is_reference else evidence.alignment.variant
    table = (evidence.reference if is_reference else evidence.variant).positions
    column = table.token if evidence.choice == "token" else table.pick
    return int(column[int(judged.starts[j]) + position])


def _largest(pairs: Pairs) -> tuple[int | None, float | None]:
    if not pairs.compared:
        return None, None
    if not len(pairs.reference):
        return 0, 0.0
    ulp = int(ulp_distance(pairs.reference, pairs.variant).max())
    return ulp, float(np.abs(pairs.deltas()).max())


def _known(gap: np.float64) -> float | None:
    return None if np.isnan(gap) else float(gap)
