"""Pairs of logprobs of one token on both sides of a comparison, and the distance between two float32 values.

It does not know rules or verdicts. Rules: only values of the same token are paired; distances are counted in units in
the last place (ulp) of float32; NaN and infinities are kept apart, never subtracted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from harness.judged import Alignment
from harness.traces import NO_TOKEN, Float32, Float64, Int32, Int64, PositionTable

BLOCK_ROWS = 4_096  # positions whose top-k lists are matched at once


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Places:
    """Positions that both sides have: the rows of both position tables, D of them."""

    reference: Int64  # (D,)
    variant: Int64  # (D,)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pairs:
    """Values of one token on both sides: the P pairs whose bits differ; `compared` counts equal ones too."""

    reference: Float32  # (P,)
    variant: Float32  # (P,)
    compared: int

    def only_finite(self) -> Pairs:
        """Without the pairs that cannot be subtracted."""
        keep = np.isfinite(self.reference) & np.isfinite(self.variant)
        lost = len(keep) - int(keep.sum())
        return Pairs(reference=self.reference[keep], variant=self.variant[keep], compared=self.compared - lost)

    def deltas(self) -> Float64:
        """variant - reference in nats, (P,)."""
        return self.variant.astype(np.float64) - self.reference.astype(np.float64)


def find_places(alignment: Alignment, numbers: Int64) -> Places:
    """Rows of both tables for numbers of the reference's judged layout."""
    ref, var = alignment.reference, alignment.variant
    offsets = ref.offsets
    request = np.searchsorted(offsets, numbers, side="right") - 1
    within = numbers - offsets[request]
    return Places(reference=ref.starts[request] + within, variant=var.starts[request] + within)


def chosen_pairs(reference: PositionTable, variant: PositionTable, places: Places) -> Pairs:
    """Chosen logprobs at the places where both sides went on with the same token."""
    if reference.logprob is None or variant.logprob is None:
        return join_pairs(())
    same = reference.token[places.reference] == variant.token[places.variant]
    return _pairs(reference.logprob[places.reference][same], variant.logprob[places.variant][same])


def candidate_pairs(reference: PositionTable, variant: PositionTable, places: Places) -> Pairs:
    """Top-k logprobs of the ids that both sides list, whatever their rank."""
    starts = range(0, len(places.reference), BLOCK_ROWS)
    parts = [_match_block(reference, variant, places, slice(start, start + BLOCK_ROWS)) for start in starts]
    return join_pairs([pairs for block in parts for pairs in block])


def _match_block(reference: PositionTable, variant: PositionTable, places: Places, block: slice) -> tuple[Pairs, ...]:
    a, b = reference, variant
    if a.topk_ids is None or a.topk_logprobs is None or b.topk_ids is None or b.topk_logprobs is None:
        return ()
    a_rows, b_rows = places.reference[block], places.variant[block]
    a_ids, b_ids = a.topk_ids[a_rows], b.topk_ids[b_rows]
    a_values, b_values = a.topk_logprobs[a_rows], b.topk_logprobs[b_rows]
    if a_ids.shape != b_ids.shape:
        return (_match_by_id(a_ids, b_ids, a_values, b_values),)
    same = (a_ids == b_ids).all(axis=1)
    other = ~same
    listed = a_ids[same] != NO_TOKEN
    return (
        _pairs(a_values[same][listed], b_values[same][listed]),
        _match_by_id(a_ids[other], b_ids[other], a_values[other], b_values[other]),
    )


def _match_by_id(a_ids: Int32, b_ids: Int32, a_values: Float32, b_values: Float32) -> Pairs:
    """Pairs of every id that both rows (B, K) and (B, K') list."""
    both = (a_ids[:, :, None] == b_ids[:, None, :]) & (a_ids != NO_TOKEN)[:, :, None]
    row, i, j = np.nonzero(both)
    return _pairs(a_values[row, i], b_values[row, j])


def _pairs(reference: Float32, variant: Float32) -> Pairs:
    unequal = reference.view(np.int32) != variant.view(np.int32)
    return Pairs(reference=reference[unequal], variant=variant[unequal], compared=len(reference))


def join_pairs(parts: Sequence[Pairs]) -> Pairs:
    """All pairs of the parts, in their order."""
    none = np.empty(0, dtype=np.float32)
    return Pairs(
        reference=np.concatenate([none, *(part.reference for part in parts)]),
        variant=np.concatenate([none, *(part.variant for part in parts)]),
        compared=sum(part.compared for part in parts),
    )


def ulp_distance(a: Float32, b: Float32) -> Int64:
    """Steps from a to b along the float32 values, element by element; -0.0 and 0.0 are 1 apart. No NaN."""
    distance: Int64 = np.abs(_ordered(a) - _ordered(b))
    return distance


def _ordered(values: Float32) -> Int64:
    """Integers in the order of the floats, consecutive for neighbours."""
    raw = np.ascontiguousarray(values).view(np.int32).astype(np.int64)
    return np.where(raw < 0, -(raw & 0x7FFFFFFF) - 1, raw)
