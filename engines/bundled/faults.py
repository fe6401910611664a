"""Faults on request: what goes wrong in engines with these features, so that a cell can be seen to notice it.

They know no requests. Rules: a fault is named in the configuration and so in the fingerprint; `none` is the default
and changes nothing; each acts only where its feature is at work.
"""

from __future__ import annotations

from collections.abc import Sequence as Slices
from dataclasses import replace
from typing import TYPE_CHECKING

from engines.bundled.batch import StepBatch

if TYPE_CHECKING:
    from engines.bundled.scheduler import Slice
    from engines.bundled.sequence import Sequence

STALE_PAGE, LOST_FLUSH, SHORT_HASH, MISPLACED_PAGE = "stale-page", "lost-flush", "short-hash", "misplaced-page"
CLONE_SAMPLES, OBSERVER_DRAWS = "clone-samples", "observer-draws"
SHARED_SAMPLING, UNVERIFIED, SHIFTED_MASKS = "shared-sampling", "unverified", "shifted-masks"
HOST_FORWARD = "host-forward"
FAULTS = {
    "none": "nothing",
    STALE_PAGE: "a step sees the page table as it was before its newest page was taken",
    LOST_FLUSH: "a step scheduled ahead reads its newest token before that token is in place",
    SHORT_HASH: "the prefix cache's keys cover the place of a page and not its tokens",
    CLONE_SAMPLES: "every sample of a request draws with the random numbers of the first",
    UNVERIFIED: "proposed tokens are taken without looking; where there is a fast path, its own alone",
    SHIFTED_MASKS: "each grammar of a step masks the logits of the one before it",
    SHARED_SAMPLING: "the first request of a step decides how all of them are sampled",
    HOST_FORWARD: "whatever device was asked for, the forward pass stays on the CPU",
    OBSERVER_DRAWS: "reporting logprobs uses up a random number",
    MISPLACED_PAGE: "a restored cache has each page's keys and values in the place of the page before it; a prompt "
    "that was handed over has each token's in the place of the token after it",
}


def spoil_batch(batch: StepBatch, slices: Slices[Slice], fault: str, page_size: int, *, ahead: bool) -> StepBatch:
    """The batch as the fault leaves it. `ahead`: the step was scheduled while the one before it ran."""
    if fault == STALE_PAGE:
        return _with_stale_pages(batch, slices, page_size)
    if fault == LOST_FLUSH and ahead:
        return _with_lost_tokens(batch, slices)
    return batch


def shift_masks(sequences: Slices[Sequence]) -> None:
    """Gives each sequence with a grammar the mask of the next such one of its step, and the last that of the first."""
    constrained = [sequence for sequence in sequences if sequence.constraint]
    for sequence, other in zip(constrained, [*constrained[1:], *constrained[:1]], strict=True):
        sequence.masker = other.constraint


def _with_stale_pages(batch: StepBatch, slices: Slices[Slice], page_size: int) -> StepBatch:
    table = batch.page_table.copy()
    for row, piece in zip(table, slices, strict=True):
        last = (piece.start + piece.count - 1) // page_size
        if last and last * page_size >= piece.start:  # taken for this very step
            row[last] = row[last - 1]
    return replace(batch, page_table=table)


def _with_lost_tokens(batch: StepBatch, slices: Slices[Slice]) -> StepBatch:
    token, end = batch.token.copy(), 0
    for piece in slices:
        end += piece.count
        if piece.completes and piece.sequence.generated:
            token[end - 1] = piece.sequence.tokens[-2]
    return replace(batch, token=token)
