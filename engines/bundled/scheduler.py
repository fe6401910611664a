"""Continuous batching: decides which tokens of which sequences run in the next step. It runs nothing itself.

Rules: sequences that run come first, in the order they were admitted, so the oldest always moves; a waiting
sequence is admitted when a seat, tokens and pages are free; when pages run out the newest gives its pages
back, waits at the front of the line and is recomputed. Nothing is dropped and nothing is cut short.

    waiting --admit--> running --finish--> done
       ^                  |
       +----- preempt ----+
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from engines.bundled.config import EngineConfig
from engines.bundled.pages import Pages
from engines.bundled.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Slice:
    """Tokens [start, start + count) of a sequence, to run in one step."""

    sequence: Sequence
    start: int
    count: int

    @property
    def completes(self) -> bool:
        """True if the step's last token is the sequence's newest: its logits are wanted."""
        return self.start + self.count == len(self.sequence.tokens)


class Scheduler:
    """Owns the line, the running sequences and the pages."""

    def __init__(self, config: EngineConfig, pages: Pages) -> None:
        """`config` gives the seats (max_num_seqs) and the tokens (max_num_batched_tokens) of a step."""
        self.pages = pages
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.preemptions = 0
        self._seats = config.max_num_seqs
        self._tokens = config.max_num_batched_tokens

    @property
    def has_work(self) -> bool:
        """True while a sequence waits or runs."""
        return bool(self.waiting or self.running)

    def add(self, sequence: Sequence) -> None:
        """Puts a sequence at the end of the line."""
        self.waiting.append(sequence)

    def schedule(self) -> list[Slice]:
        """The slices of the next step, at most one per sequence; pages for them are taken."""
        preempted_before = self.preemptions
        slices = self._continue_running()
        if self.preemptions == preempted_before:
            slices += self._admit_waiting(self._tokens - sum(piece.count for piece in slices))
        return slices

    def finish(self, sequence: Sequence) -> None:
        """Takes a finished sequence out and gives its pages back."""
        self.running.remove(sequence)
        self._release(sequence)

    def abandon(self) -> None:
        """Empties line and seats; every page comes back."""
        for sequence in self.running:
            self._release(sequence)
        self.running.clear()
        self.waiting.clear()

    def _continue_running(self) -> list[Slice]:
        slices: list[Slice] = []
        budget = self._tokens
        index = 0
        while index < len(self.running) and budget > 0:
            sequence = self.running[index]
            count = min(sequence.remaining, budget)
            if not self._make_room(sequence, count):
                break
            slices.append(self._take(sequence, count))
            budget -= count
            index += 1
        return slices

    def _admit_waiting(self, budget: int) -> list[Slice]:
        slices: list[Slice] = []
        while self.waiting and budget > 0 and len(self.running) < self._seats:
            count = min(self.waiting[0].remaining, budget)
            if not self._can_run(self.waiting[0], count):
                break
            sequence = self.waiting.popleft()
            self.running.append(sequence)
            slices.append(self._take(sequence, count))
            budget -= count
        return slices

    def _can_run(self, sequence: Sequence, count: int) -> bool:
        return self.pages.can_allocate(self._pages_needed(sequence, count))

    def _make_room(self, sequence: Sequence, count: int) -> bool:
        """Preempts the newest until `count` tokens of `sequence` fit; False if that took `sequence` itself."""
        while not self._can_run(sequence, count):
            victim = self.running.pop()
            self._preempt(victim)
            if victim is sequence:
                return False
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self._release(sequence)
        sequence.preempt()
        self.waiting.appendleft(sequence)
        self.preemptions += 1

    def _take(self, sequence: Sequence, count: int) -> Slice:
        sequence.pages += self.pages.allocate(self._pages_needed(sequence, count))
        return Slice(sequence, sequence.computed, count)

    def _pages_needed(self, sequence: Sequence, count: int) -> int:
        return self.pages.needed(sequence.computed + count, held=len(sequence.pages))

    def _release(self, sequence: Sequence) -> None:
        self.pages.release(sequence.pages)
        sequence.pages.clear()
