"""Speculative decoding: who proposes the next tokens. The engine verifies each with its own draw.

It does not know what is accepted and decides no token. Rules: a proposal may be anything, since the engine takes its
own token as if there were none (docs/numerics.md); only a sequence whose next logits are one token away gets any.

    lookup   what followed the last words where they occurred before, in prompt and output
    model    the target's own first layers, with KV pages of their own
    forced   the path a request is forced along: so it is read like a prompt

Requests that a fast path decodes (`engines.bundled.fast`) get their proposals from it.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Tokens
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from engines.bundled.arithmetic import NAMES, open_arithmetic
from engines.bundled.batch import Arithmetic, StepBatch
from engines.bundled.config import EngineConfig, Model
from engines.bundled.errors import NotSupported
from engines.bundled.kernels.interface import SamplerKernels
from engines.bundled.pages import Pages
from engines.bundled.philox import DRAFT_STREAM, uniform
from engines.bundled.sequence import Sequence

MOST_SCORED = 64  # tokens of a scored path in one step; all their logits are held at once
LONGEST_MATCH = 3  # tokens of context that lookup tries to find again, at most


class Proposer(Protocol):
    """Proposes up to `count` tokens after a sequence's newest."""

    def propose(self, sequence: Sequence, count: int) -> list[int]:
        """At most `count` token ids."""

    def retain(self, sequences: Iterable[Sequence]) -> None:
        """Forgets every sequence that is not among these."""


class Drafter:
    """Asks a proposer for as many tokens as the policy says."""

    def __init__(self, proposer: Proposer, config: EngineConfig) -> None:
        """Lengths begin at `draft_length`."""
        self._proposer = proposer
        self._longest = config.draft_length
        self._variable = config.draft_policy == "variable"

    def propose(self, sequences: Tokens[Sequence]) -> None:
        """Fills `drafts` of the sequences that wait for nothing but their newest token."""
        self._proposer.retain(sequences)
        for sequence in sequences:
            if sequence.remaining == 1 and not sequence.drafts and not sequence.fast:
                count = min(self._length(sequence), sequence.most_drafts)
                sequence.drafts = self._proposer.propose(sequence, count) if count else []

    def _length(self, sequence: Sequence) -> int:
        """Fixed; or one more than what is accepted per step on average, a function of the sequence's own past."""
        if not self._variable or not sequence.drafted:
            return self._longest
        steps = max(1, sequence.generated - sequence.accepted)
        return max(1, min(self._longest, 1 + round(2 * sequence.accepted / steps)))


class ForcedDrafter:
    """Proposes the whole forced path at once, so that it is computed as a prompt is."""

    def propose(self, sequences: Tokens[Sequence]) -> None:
        """Fills `drafts` of every sequence on a forced path."""
        for sequence in sequences:
            path = sequence.request.forced
            if path is not None and not sequence.drafts:
                sequence.drafts = list(path[sequence.generated : -1])


def propose_scored(sequences: Tokens[Sequence]) -> None:
    """Proposes the next part of a path that is to be scored, whoever else drafts: so it is computed as a prompt is."""
    for sequence in sequences:
        path = sequence.request.forced
        if sequence.request.scored and path is not None and not sequence.drafts:
            sequence.drafts = list(path[sequence.generated : -1][:MOST_SCORED])


class Lookup:
    """Finds the last tokens earlier in the text and proposes what came next. Source: prompt-lookup decoding."""

    def propose(self, sequence: Sequence, count: int) -> list[int]:
        """The longest match wins, the latest of equal ones."""
        tokens = sequence.tokens
        for size in range(min(LONGEST_MATCH, len(tokens) - 1), 0, -1):
            end = _last_match(tokens, size)
            if end is not None:
                return tokens[end : end + count]
        return []

    def retain(self, sequences: Iterable[Sequence]) -> None:
        """It remembers nothing."""


def _last_match(tokens: list[int], size: int) -> int | None:
    """Where the last earlier occurrence of the final `size` tokens ends."""
    tail = tokens[-size:]
    for end in range(len(tokens) - 1, size - 1, -1):
        if tokens[end - size : end] == tail:
            return end
    return None


@dataclass(slots=True)
class _Memory:
    """What the draft model has computed of one sequence."""

    sequence: Sequence
    tokens: list[int]  # whose keys and values lie in the pages
    pages: list[int]


class LayerDraft:
    """The target's first layers as a model of its own. It draws from the draft stream."""

    def __init__(self, arithmetic: Arithmetic, kernels: SamplerKernels, config: EngineConfig) -> None:
        """`arithmetic` has pages of its own, as many as `config` says."""
        self._arithmetic, self._kernels = arithmetic, kernels
        self._pages = Pages(config.num_pages, config.page_size)
        self._most = config.max_num_batched_tokens
        self._memories: dict[int, _Memory] = {}

    def propose(self, sequence: Sequence, count: int) -> list[int]:
        """One token after another; none when its pages are short."""
        memory = self._memories.setdefault(sequence.number, _Memory(sequence, [], []))
        needed = self._pages.needed(len(sequence.tokens) + count, held=len(memory.pages))
        if not self._pages.can_allocate(needed):
            return []
        memory.pages += self._pages.allocate(needed)
        line = list(sequence.tokens)
        for _ in range(count):
            line.append(self._next(memory, line, sequence))
        return line[len(sequence.tokens) :]

    def retain(self, sequences: Iterable[Sequence]) -> None:
        """Pages of sequences that left come back."""
        here = {sequence.number: sequence for sequence in sequences}
        for number in sorted(self._memories):
            if here.get(number) is not self._memories[number].sequence:
                self._pages.release(self._memories.pop(number).pages)

    def _next(self, memory: _Memory, line: list[int], sequence: Sequence) -> int:
        known = _common(memory.tokens, line[:-1])
        while known < len(line):
            part = line[known : known + self._most]
            logits = self._arithmetic.forward(_batch(part, known, memory.pages))
            known += len(part)
        memory.tokens = list(line)
        sampling = sequence.request.sampling
        if sampling.temperature == 0 or sampling.seed is None:
            return int(self._kernels.argmax(logits)[0])
        u = uniform(sampling.seed, len(line), sequence.request.sample, DRAFT_STREAM)
        return self._kernels.draw(logits[0], sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p, u)


def open_drafter(model: Model, config: EngineConfig, kernels: SamplerKernels) -> Drafter | ForcedDrafter | None:
    """What the configuration asks for. Raises NotSupported for what does not go together."""
    if config.scoring == "prefill":
        if config.draft != "off" or config.rollback != "off":
            raise NotSupported("scoring = prefill with draft or rollback: choose one of them")
        return ForcedDrafter()
    if config.draft == "off":
        return None
    if config.rollback == "all":
        raise NotSupported(f"rollback = all with draft = {config.draft}: no request would be left for the drafts")
    if config.draft == "lookup":
        return Drafter(Lookup(), config)
    small = first_layers(model)
    name = config.arithmetic if config.arithmetic in NAMES else "portable"  # it runs on the CPU and decides nothing
    own = replace(config, draft="off", arithmetic=name, dtype="float32")
    return Drafter(LayerDraft(open_arithmetic(small, own), kernels, config), config)


def first_layers(model: Model) -> Model:
    """The first half of the layers, rounded up, under the same embedding, last norm and head."""
    count = (model.config.num_hidden_layers + 1) // 2
    dropped = tuple(f"model.layers.{i}." for i in range(count, model.config.num_hidden_layers))
    weights = {name: weight for name, weight in model.weights.items() if not name.startswith(dropped)}
    return replace(model, config=replace(model.config, num_hidden_layers=count), weights=weights)


def _common(known: list[int], wanted: list[int]) -> int:
    """Length of the common prefix."""
    pairs = zip(known, wanted, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(known), len(wanted)))


def _batch(tokens: list[int], start: int, pages: list[int]) -> StepBatch:
    """Tokens of one sequence from `start` on; the last one's logits are wanted."""
    return StepBatch(
        token=np.array(tokens, np.int32),
        sequence=np.zeros(len(tokens), np.int32),
        position=np.arange(start, start + len(tokens), dtype=np.int32),
        page_table=np.array([pages], np.int32),
        wanted=np.array([len(tokens) - 1], np.int32),
    )
