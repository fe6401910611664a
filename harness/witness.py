"""Witnesses an axis: at which generated positions did it really vary, by the step tables of both arms.

It does not know cells, verdicts or engines' claims (`harness.claims` checks those). Rules: evidence is read from the
step tables, per request; a position is witnessed if it, or any position it attends to, was computed under a varied
condition; keys and values that were recomputed count as the recomputation made them; what a table does not show is not
witnessed; a token is compared with the same token of the reference, recomputation with recomputation; one that an arm
never computed (it came from a cache) varies in nothing but the kind `cached`.

The kinds:

    beside       the variant's step also ran tokens of another request, and those others differ from the reference's
    composition  the others in the step differ between the arms, whichever arm has them
    chunks       a prompt token was computed in a chunk with other borders
    cached       prompt tokens came from a cache in the variant and not in the reference
    preempted    computed anew after a preemption in the variant, in a request the reference never preempted
    samples      as beside, in a request whose samples do not all say the same (clones witness nothing)
    drafts       an output token was computed in a row with other borders, in a request of which the variant accepted
                 proposed tokens; where the reference proposed nothing, the variant must have needed fewer rows
    rollbacks    as drafts, in a request of which the variant threw proposed tokens away
    all          the axis acts on the whole process; the caller vouches for it with a reason

"The others" of a step are the multiset of (context length, token count) of its rows, without the request's own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from harness.axis import WitnessKind
from harness.claims import check_claims, find_malformed
from harness.entries import Entries, Rows, expand, match
from harness.judged import Alignment, ComparisonError, RequestKey, align
from harness.traces import Bool, Int64, Traces

__all__ = ["Witness", "check_claims", "witnessed"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Witness:
    """Which positions of the reference's judged layout the axis was witnessed at, and in words."""

    kind: WitnessKind
    mask: Bool  # (N,)
    keys: tuple[RequestKey, ...]  # (J,)
    per_request: Int64  # (J,) witnessed positions
    sentence: str

    @property
    def positions(self) -> int:
        """Witnessed positions in all."""
        return int(self.mask.sum())


def witnessed(reference: Traces, variant: Traces, kind: WitnessKind, reason: str = "") -> Witness:
    """Finds the witnessed positions. `reason` is required for kind `all`, and is what the caller observed.

    Raises ComparisonError when the arms hold different requests, a step table cannot be read, or `all` comes without a
    reason.
    """
    alignment = align(reference, variant)
    nothing = np.zeros(alignment.reference.positions, dtype=np.bool_)
    if kind == "all":
        if not reason:
            raise ComparisonError("witness 'all' needs the observation that shows that the process differed")
        return _witness(kind, alignment, ~nothing, reason)
    if variant.steps is None or reference.steps is None:
        side = "variant" if variant.steps is None else "reference"
        return _witness(kind, alignment, nothing, f"the {side} shows no step table, so nothing is witnessed")
    for side, traces, steps in (("reference", reference, reference.steps), ("variant", variant, variant.steps)):
        malformed = find_malformed(steps, len(traces.requests.id))
        if malformed:
            raise ComparisonError(f"{side}: {'; '.join(malformed)}")
    arms = _Arms(reference, variant, alignment, expand(variant, alignment.variant))
    mask = _spread(arms, _FINDERS[kind](arms))
    return _witness(kind, alignment, mask, _SENTENCES[kind])


def _witness(kind: WitnessKind, alignment: Alignment, mask: Bool, sentence: str) -> Witness:
    offsets = alignment.reference.offsets
    per_request = np.add.reduceat(mask.astype(np.int64), offsets[:-1])
    reached = (
        f"{int(mask.sum())} of {len(mask)} positions in {int((per_request > 0).sum())} of {len(per_request)} requests"
    )
    return Witness(
        kind=kind, mask=mask, keys=alignment.keys, per_request=per_request, sentence=f"{sentence}: {reached}"
    )


class _Arms(NamedTuple):
    """Both captures, aligned, and the variant's step table spread out."""

    reference: Traces
    variant: Traces
    alignment: Alignment
    entries: Entries

    def in_reference(self) -> tuple[Rows, Int64]:
        """The reference's rows, and for each entry the row that computed the same token there, or -1."""
        entries = expand(self.reference, self.alignment.reference)
        return entries.rows, match(self.entries, entries)


def _find_composition(arms: _Arms) -> Bool:
    rows, same = arms.in_reference()
    others = arms.entries.rows.others[arms.entries.row]
    if not len(rows.others):
        return np.zeros(len(others), dtype=np.bool_)
    differs: Bool = (same >= 0) & (others != rows.others[same])
    return differs


def _find_beside(arms: _Arms) -> Bool:
    return _find_composition(arms) & (arms.entries.rows.company[arms.entries.row] > 0)


def _find_chunks(arms: _Arms) -> Bool:
    """Chunks follow each other without gaps, so other borders mean that some chunk begins elsewhere."""
    rows, same = arms.in_reference()
    entries = arms.entries
    if not len(rows.start):
        return np.zeros(len(entries.row), dtype=np.bool_)
    prompt = arms.variant.requests.prompt_tokens[arms.alignment.variant.rows]
    inside = entries.token < prompt[entries.request]
    varied: Bool = inside & (same >= 0) & (entries.rows.start[entries.row] != rows.start[same])
    return varied


def _find_cached(arms: _Arms) -> Bool:
    """The first computed token of a request that found part of its prompt in the cache attends to that part."""
    variant, reference = arms.alignment.variant, arms.alignment.reference
    hit = arms.variant.requests.cached_tokens[variant.rows] > 0
    hit &= arms.reference.requests.cached_tokens[reference.rows] == 0
    varied: Bool = hit[arms.entries.request]
    return varied


def _find_preempted(arms: _Arms) -> Bool:
    calm = arms.reference.requests.preemptions[arms.alignment.reference.rows] == 0
    entries = arms.entries
    first_epoch = np.full(len(arms.alignment.keys), np.iinfo(np.int64).max)
    np.minimum.at(first_epoch, entries.request, entries.epoch)
    varied: Bool = calm[entries.request] & (entries.epoch > first_epoch[entries.request])
    return varied


def _find_samples(arms: _Arms) -> Bool:
    varied: Bool = _find_beside(arms) & _distinct(arms)[arms.entries.request]
    return varied


def _distinct(arms: _Arms) -> Bool:
    """(J,) whether some other sample of the same request has other tokens, in the reference."""
    judged, tokens = arms.alignment.reference, arms.reference.positions.token
    parts = [tokens[s : s + n].tobytes() for s, n in zip(judged.starts, judged.lengths, strict=True)]
    said: dict[str, set[bytes]] = {}
    for key, part in zip(judged.keys, parts, strict=True):
        said.setdefault(key.id, set()).add(part)
    return np.array([len(said[key.id]) > 1 for key in judged.keys], dtype=np.bool_)


def _find_drafts(arms: _Arms) -> Bool:
    """Rows that verify proposals begin and end elsewhere than rows of one token."""
    rows, same = arms.in_reference()
    entries = arms.entries
    accepted, proposed = arms.variant.requests.accepted, arms.reference.requests.drafted
    if accepted is None or not len(rows.start):
        return np.zeros(len(entries.row), dtype=np.bool_)
    helped = accepted[arms.alignment.variant.rows] > 0
    here = np.bincount(entries.rows.request, minlength=len(helped))
    there = np.bincount(rows.request, minlength=len(helped))
    before = np.zeros(len(helped), np.int32) if proposed is None else proposed[arms.alignment.reference.rows]
    helped &= (before > 0) | (here < there)
    prompt = arms.variant.requests.prompt_tokens[arms.alignment.variant.rows]
    output = entries.token >= prompt[entries.request]
    other = (entries.rows.start[entries.row] != rows.start[same]) | (
        entries.rows.count[entries.row] != rows.count[same]
    )
    varied: Bool = output & helped[entries.request] & (same >= 0) & other
    return varied


def _find_rollbacks(arms: _Arms) -> Bool:
    thrown = arms.variant.requests.rollbacks
    if thrown is None:
        return np.zeros(len(arms.entries.row), dtype=np.bool_)
    varied: Bool = _find_drafts(arms) & (thrown[arms.alignment.variant.rows] > 0)[arms.entries.request]
    return varied


_FINDERS: dict[WitnessKind, Callable[[_Arms], Bool]] = {
    "beside": _find_beside,
    "composition": _find_composition,
    "chunks": _find_chunks,
    "cached": _find_cached,
    "preempted": _find_preempted,
    "samples": _find_samples,
    "drafts": _find_drafts,
    "rollbacks": _find_rollbacks,
}
_SENTENCES: dict[WitnessKind, str] = {
    "beside": "computed beside other requests than the reference",
    "composition": "computed in steps of another composition than the reference",
    "chunks": "after a prompt that was cut into other chunks than the reference",
    "cached": "after a prompt that came from the cache, which the reference computed",
    "samples": "computed beside the request's other samples, which differ from it",
    "drafts": "computed in rows that verified proposed tokens, some of them accepted",
    "rollbacks": "computed in rows that verified a fast path, in requests where it was wrong and rolled back",
    "preempted": "computed anew after a preemption, which the reference did not have",
}


def _spread(arms: _Arms, varied: Bool) -> Bool:
    """From varied entries to the positions, in the reference's judged layout, whose logits they can reach.

    An entry reaches a position if the position's own token ran at or after it, before a rewind threw the entry away.
    """
    entries = arms.entries
    reached = _reached(entries, varied)
    prompt = arms.variant.requests.prompt_tokens[arms.alignment.variant.rows].astype(np.int64)
    position = entries.token - prompt[entries.request] + 1  # the output whose logits this token yields
    lengths = np.minimum(arms.alignment.reference.lengths, arms.alignment.variant.lengths)
    real = entries.fresh & reached & (position >= 0) & (position < lengths[entries.request])
    mask = np.zeros(arms.alignment.reference.positions, dtype=np.bool_)
    mask[arms.alignment.reference.offsets[entries.request[real]] + position[real]] = True
    return mask


def _reached(entries: Entries, varied: Bool) -> Bool:
    """Entries that are varied or attend to a varied one that is still in the KV cache, (E,)."""
    if not len(varied):
        return varied
    heads = np.flatnonzero(np.concatenate(([True], entries.epoch[1:] != entries.epoch[:-1])))
    numbers = np.arange(len(varied))
    first = np.minimum.reduceat(np.where(varied, numbers, len(varied)), heads)  # per epoch
    kept = _kept(entries, heads, first)
    return kept[entries.epoch] | (numbers >= first[entries.epoch])


def _kept(entries: Entries, heads: Int64, first: Int64) -> Bool:
    """Per epoch: whether a varied token of an earlier epoch of the same request survives the rewind that began it."""
    kept = np.zeros(len(heads), dtype=np.bool_)
    if len(heads) == len(np.unique(entries.request)):
        return kept  # no rewind anywhere
    earliest, request = _NEVER, -1
    for epoch, head in enumerate(heads.tolist()):
        if int(entries.request[head]) != request:
            earliest, request = _NEVER, int(entries.request[head])
        if earliest >= int(entries.token[head]):
            earliest = _NEVER
        kept[epoch] = earliest != _NEVER
        if first[epoch] < len(entries.token):
            earliest = min(earliest, int(entries.token[first[epoch]]))
    return kept


_NEVER = 2**62  # later than any token
