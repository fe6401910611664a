"""The fast path of verify-and-rollback decoding: the target in bfloat16 weights and free order, one token a step.

It does not know what is accepted and decides no token. Rules: it writes into the target's own KV pages, only at and
after the first token whose keys and values are not final, and verification writes all of them anew; a sequence is held
while its window fills and is verified with whoever else runs in that step; which requests it decodes is each request's
own choice, or the configuration's. Source: the decode-verify-rollback protocol of LLM-42 (arXiv 2601.17768).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol, runtime_checkable

import numpy as np

from engines.bundled.arithmetic import open_arithmetic
from engines.bundled.batch import Arithmetic, StepBatch
from engines.bundled.config import EngineConfig, Float32, Model
from engines.bundled.errors import NotSupported
from engines.bundled.kernels.interface import SamplerKernels
from engines.bundled.philox import TARGET_STREAM, uniform
from engines.bundled.scheduler import Scheduler
from engines.bundled.sequence import Sequence

UNUSED_PAGE = -1  # fills page tables past a sequence's end; never read


@runtime_checkable
class LendsPages(Protocol):
    """An arithmetic on a device that can be computed with in free order over the same pages."""

    def free_over_my_pages(self, model: Model) -> Arithmetic:
        """`free` with the model's weights."""


class FastPath:
    """Decodes windows of `draft_length` tokens, all sequences together, for the target to verify."""

    def __init__(self, arithmetic: Arithmetic, kernels: SamplerKernels, config: EngineConfig) -> None:
        """`arithmetic` shares its pages with the target; `rollback` of the configuration says whom it decodes."""
        self.tokens = 0  # decoded since the engine started or was reset, verified or not
        self.arithmetic = arithmetic
        self._kernels = kernels
        self._window = config.draft_length
        self._most_rows = config.max_num_batched_tokens
        self._who = config.rollback

    def covers(self, sequence: Sequence) -> bool:
        """Whether it decodes this sequence."""
        return self._who == "all" or sequence.request.rollback

    def advance(self, scheduler: Scheduler) -> None:
        """One token further for every running sequence whose window is not full; it is held until it is.

        Where pages are short, or the fast path's logits are no numbers, the window ends early.
        """
        growing: list[Sequence] = []
        for sequence in scheduler.running:
            sequence.held = False
            wanted = len(growing) < self._most_rows and self._has_room(sequence)
            if wanted and scheduler.reserve(sequence, len(sequence.line)):
                growing.append(sequence)
        if growing:
            logits = self.arithmetic.forward(newest_tokens(growing))
            for sequence, row in zip(growing, logits, strict=True):
                self._propose(sequence, row)

    def _has_room(self, sequence: Sequence) -> bool:
        decoding = len(sequence.tokens) - sequence.computed == 1
        return sequence.fast and decoding and len(sequence.drafts) < self._length(sequence)

    def _length(self, sequence: Sequence) -> int:
        return min(self._window, sequence.most_drafts)

    def _propose(self, sequence: Sequence, logits: Float32) -> None:
        """One more proposal from raw logits (vocab,), drawn with the target's own random number."""
        if not np.isfinite(logits).all():
            return
        sampling = sequence.request.sampling
        if sampling.temperature == 0 or sampling.seed is None:
            token = int(self._kernels.argmax(logits[np.newaxis])[0])
        else:
            u = uniform(sampling.seed, len(sequence.line), sequence.request.sample, TARGET_STREAM)
            token = self._kernels.draw(logits, sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p, u)
        sequence.drafts.append(token)
        sequence.held = len(sequence.drafts) < self._length(sequence)
        self.tokens += 1


def open_fast_path(model: Model, config: EngineConfig, kernels: SamplerKernels, target: Arithmetic) -> FastPath | None:
    """What `rollback` asks for; None when it is off. Raises NotSupported for a target whose pages it cannot share."""
    from engines.bundled.arithmetic.portable import KernelArithmetic

    if config.rollback == "off":
        return None
    if isinstance(target, LendsPages):
        return FastPath(target.free_over_my_pages(in_bfloat16(model)), kernels, config)
    if not isinstance(target, KernelArithmetic):
        raise NotSupported(
            f"rollback = {config.rollback} on arithmetic {target.name} of {type(target).__module__}: the fast path "
            "writes into the target's own KV pages, which this one does not lend; use arithmetic portable, free or "
            "tensorcore in one process"
        )
    fast = open_arithmetic(in_bfloat16(model), replace(config, arithmetic="free"))
    if not isinstance(fast, KernelArithmetic):
        raise NotSupported(f"rollback: the fast path came out as {type(fast).__name__}, not as the CPU kernels'")
    fast.pages = target.pages
    return FastPath(fast, kernels, config)


def in_bfloat16(model: Model) -> Model:
    """The same model with every weight rounded to bfloat16, to nearest even, and kept as float32."""
    return replace(model, weights={name: _round_to_bfloat16(weight) for name, weight in model.weights.items()})


def newest_tokens(sequences: list[Sequence]) -> StepBatch:
    """The last token of each sequence's line; all logits are wanted."""
    count = len(sequences)
    table = np.full((count, max(len(sequence.pages) for sequence in sequences)), UNUSED_PAGE, np.int32)
    for row, sequence in zip(table, sequences, strict=True):
        row[: len(sequence.pages)] = sequence.pages
    return StepBatch(
        token=np.array([sequence.line[-1] for sequence in sequences], np.int32),
        sequence=np.arange(count, dtype=np.int32),
        position=np.array([len(sequence.line) - 1 for sequence in sequences], np.int32),
        page_table=table,
        wanted=np.arange(count, dtype=np.int32),
    )


def _round_to_bfloat16(weight: Float32) -> Float32:
    bits = np.ascontiguousarray(weight).view(np.uint32)
    rounded = (bits + (np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))) & np.uint32(0xFFFF0000)
    return rounded.view(np.float32)
