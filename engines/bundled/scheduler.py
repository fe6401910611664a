"""Continuous batching: decides which tokens of which sequences run in the next step. It runs nothing itself.

Rules: sequences that run come first, in the order of the policy, so the first in rank always moves; a waiting
sequence is admitted when a seat, tokens and pages are free; what the prefix cache holds of it is not computed; when
pages run out the last in rank gives its pages back, waits in its place in line and is recomputed; under a policy that
preempts, so does one that runs while a more urgent one waits. Nothing is dropped and nothing is cut short. While a step
runs the next one may be scheduled, but nobody is preempted then.

    waiting --admit--> running --finish--> done
       ^                  |
       +----- preempt ----+     (abort: out of either, pages back)
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass
from typing import TYPE_CHECKING

from engines.bundled.config import EngineConfig
from engines.bundled.pages import Pages
from engines.bundled.policy import POLICIES, PREEMPTIVE
from engines.bundled.prefix import PrefixCache
from engines.bundled.sequence import Sequence

if TYPE_CHECKING:
    from engines.bundled.parallel.handover import Inbox


@dataclass(frozen=True, slots=True)
class Slice:
    """Tokens [start, start + count) of a sequence, to run in one step."""

    sequence: Sequence
    start: int
    count: int

    @property
    def completes(self) -> bool:
        """True if the step runs the sequence's newest token: its logits are wanted."""
        return self.wanted > 0

    @property
    def wanted(self) -> int:
        """How many of its last tokens have wanted logits: the newest and the proposals after it."""
        return max(0, self.start + self.count + 1 - len(self.sequence.tokens))


class Scheduler:
    """Owns the line, the running sequences and the pages."""

    def __init__(self, config: EngineConfig, pages: Pages, cache: PrefixCache | None = None) -> None:
        """`config` gives the seats (max_num_seqs) and the tokens (max_num_batched_tokens) of a step."""
        self.pages = pages
        self.cache = cache
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.preemptions = 0
        self.gave_way = 0  # of these, those whose seat a more urgent one took
        self._seats = config.max_num_seqs
        self._tokens = config.max_num_batched_tokens
        self._rank = POLICIES[config.policy]
        self._preemptive = config.policy in PREEMPTIVE and config.priority_preempts
        self._submitted = 0
        self.inbox: Inbox | None = None  # what another process computed of the sequences to come

    @property
    def has_work(self) -> bool:
        """True while a sequence waits or runs."""
        return bool(self.waiting or self.running)

    @property
    def unfinished(self) -> tuple[Sequence, ...]:
        """Every sequence that runs or waits."""
        return (*self.running, *self.waiting)

    def add(self, sequence: Sequence) -> None:
        """Puts a sequence in its place in line."""
        sequence.number = self._submitted
        self._submitted += 1
        insort(self.waiting, sequence, key=self._rank)

    def schedule(self) -> list[Slice]:
        """The slices of the next step, at most one per sequence; pages for them are taken.

        Empty only where a fast path holds every sequence that could run.
        """
        self._seat_the_urgent()
        in_line = len(self.waiting)
        slices, _ = self._continue_running(may_preempt=True)
        if len(self.waiting) == in_line:
            slices += self._admit_waiting(self._tokens - sum(piece.count for piece in slices))
        return slices

    def schedule_ahead(self, under_way: list[Slice]) -> list[Slice]:
        """The slices of the step after the one under way, as far as they need neither its results nor its pages.

        Empty when somebody must be preempted for a more urgent one: that waits for the step's end.
        """
        for piece in under_way:
            piece.sequence.take_off(piece.count)
        if self._is_outranked():
            return []
        slices, short = self._continue_running(may_preempt=False)
        if not short:
            slices += self._admit_waiting(self._tokens - sum(piece.count for piece in slices))
        return slices

    def complete(self, plan: list[Slice]) -> list[Slice]:
        """A plan made ahead, brought up to the results of the step before.

        A plan says who runs and has the pages for it; proposals, tokens that were thrown away and sequences whose next
        tokens were open are known only now. Nobody is preempted: what does not fit waits for the step after.
        """
        planned = {id(piece.sequence): piece.count for piece in plan}
        spare = self._tokens - sum(planned.values())
        slices = []
        for sequence in self.running:
            least = planned.get(id(sequence), 0)
            count = min(sequence.remaining, least + spare)
            if count > least and not self._can_run(sequence, count):
                count = least
            if count:
                slices.append(self._take(sequence, count))
            spare -= count - least
        return slices

    def reserve(self, sequence: Sequence, tokens: int) -> bool:
        """Takes the pages that a running sequence needs to hold `tokens` tokens; False if they are not free."""
        needed = self.pages.needed(tokens, held=len(sequence.pages))
        if not self.pages.can_allocate(needed):
            return False
        self._grow(sequence, needed)
        return True

    def publish(self, sequence: Sequence) -> None:
        """Tells the prefix cache of the whole pages whose tokens are computed and final."""
        if self.cache is None:
            return
        whole = sequence.cacheable // self.pages.size
        if whole > sequence.published:
            fresh = slice(sequence.published, whole)
            self.cache.publish(self._keys(sequence, whole)[fresh], sequence.pages[fresh])
            sequence.published = whole

    def finish(self, sequence: Sequence) -> None:
        """Takes a finished sequence out and gives its pages back."""
        self.running.remove(sequence)
        self._release(sequence)

    def abort(self, sequence: Sequence) -> None:
        """Takes an unfinished sequence out of the line or its seat; its pages come back."""
        if sequence in self.waiting:
            self.waiting.remove(sequence)
        else:
            self.finish(sequence)

    def requeue(self) -> None:
        """Preempts everything that runs; a sequence that is over already only gives its pages back."""
        for sequence in tuple(reversed(self.running)):
            if sequence.finish_reason is None:
                self.running.remove(sequence)
                self._preempt(sequence)
            else:
                self.finish(sequence)

    def abandon(self) -> None:
        """Empties line and seats; every page comes back."""
        for sequence in self.running:
            self._release(sequence)
        self.running.clear()
        self.waiting.clear()

    def _continue_running(self, *, may_preempt: bool) -> tuple[list[Slice], bool]:
        """Slices of what runs, and whether pages were short for one of them."""
        slices: list[Slice] = []
        budget = self._tokens
        index = 0
        while index < len(self.running) and budget > 0:
            sequence = self.running[index]
            count = min(sequence.remaining, budget)
            if not self._make_room(sequence, count, may_preempt=may_preempt):
                return slices, True
            if count:
                slices.append(self._take(sequence, count))
            budget -= count
            index += 1
        return slices, False

    def _is_outranked(self) -> bool:
        """True if somebody runs who is less urgent than somebody who waits."""
        if not (self._preemptive and self.waiting and self.running):
            return False
        return self._rank(self.waiting[0])[0] < self._rank(self.running[-1])[0]

    def _seat_the_urgent(self) -> None:
        """Whoever waits and outranks one that runs gets a seat, that one's if there is no other.

        Pages and tokens of the step it gets in its turn, as those that run do.
        """
        while self._is_outranked():
            if len(self.running) >= self._seats:
                victim = self.running.pop()
                self.gave_way += not victim.idle
                self._preempt(victim)
            self._seat(self._find_cached(self.waiting[0]))

    def _admit_waiting(self, budget: int) -> list[Slice]:
        slices: list[Slice] = []
        while self.waiting and budget > 0 and len(self.running) < self._seats:
            sequence = self.waiting[0]
            found = self._find_cached(sequence)
            known = max(len(found) * self.pages.size, self.inbox.find(sequence) if self.inbox else 0)
            count = min(sequence.remaining - known, budget)
            if not self._can_admit(found, known + count):
                break
            self._seat(found)
            slices.append(self._take(sequence, count))
            budget -= count
        return slices

    def _find_cached(self, sequence: Sequence) -> list[int]:
        """Pages that hold a prefix of the sequence, short of its last token, whose logits are wanted."""
        if self.cache is None:
            return []
        return self.cache.lookup(self._keys(sequence, (len(sequence.tokens) - 1) // self.pages.size))

    def _keys(self, sequence: Sequence, whole: int) -> list[bytes]:
        """Keys of the sequence's first `whole` pages, all of them whole."""
        if self.cache is not None and len(sequence.page_keys) < whole:
            tokens = sequence.tokens[: whole * self.pages.size]
            sequence.page_keys = self.cache.keys(tokens, sequence.page_keys)
        return sequence.page_keys[:whole]

    def _can_admit(self, found: list[int], tokens: int) -> bool:
        """True if `tokens` tokens, the first of them in the `found` pages, fit once those are held."""
        needed = self.pages.needed(tokens, held=len(found))
        return self.pages.can_allocate(needed + sum(map(self.pages.is_free, found)))

    def _seat(self, found: list[int]) -> None:
        """The first in line runs from now on; the `found` pages hold its beginning."""
        sequence = self.waiting.pop(0)
        insort(self.running, sequence, key=self._rank)
        self.pages.share(found)
        sequence.pages += found
        sequence.published = len(found)
        sequence.computed = len(found) * self.pages.size
        sequence.idle = True
        if self.inbox is not None:
            self._receive(sequence, self.inbox)

    def _receive(self, sequence: Sequence, inbox: Inbox) -> None:
        """Puts what another process computed of the sequence into pages of its own, if there are enough."""
        count = inbox.find(sequence)
        if count and self.reserve(sequence, count):
            inbox.fill(sequence)
            sequence.computed = count

    def _note_reuse(self, sequence: Sequence) -> None:
        """With its first tokens on a seat it is settled what the prefix cache saved."""
        if sequence.preemptions:
            sequence.restored_tokens += sequence.computed
        else:
            sequence.cached_tokens = sequence.computed
        sequence.idle = False

    def _can_run(self, sequence: Sequence, count: int) -> bool:
        return self.pages.can_allocate(self._pages_needed(sequence, count))

    def _make_room(self, sequence: Sequence, count: int, *, may_preempt: bool) -> bool:
        """Preempts the last in rank until `count` tokens of `sequence` fit; False if that took `sequence` itself."""
        while not self._can_run(sequence, count):
            if not may_preempt:
                return False
            victim = self.running.pop()
            self._preempt(victim)
            if victim is sequence:
                return False
        return True

    def _preempt(self, sequence: Sequence) -> None:
        """Back into the line; one that has run nothing on its seat loses nothing, and it does not count."""
        self._release(sequence)
        self.preemptions += not sequence.idle
        sequence.preempt(counted=not sequence.idle)
        insort(self.waiting, sequence, key=self._rank)

    def _take(self, sequence: Sequence, count: int) -> Slice:
        if sequence.idle:
            self._note_reuse(sequence)
        self._grow(sequence, self._pages_needed(sequence, count))
        return Slice(sequence, sequence.scheduled, count)

    def _grow(self, sequence: Sequence, pages: int) -> None:
        taken = self.pages.allocate(pages)
        if self.cache is not None:
            self.cache.forget(taken)
        sequence.pages += taken

    def _pages_needed(self, sequence: Sequence, count: int) -> int:
        return self.pages.needed(sequence.scheduled + count, held=len(sequence.pages))

    def _release(self, sequence: Sequence) -> None:
        """The end of a sequence goes back first: it is the least likely to be found again."""
        self.pages.release(reversed(sequence.pages))
        sequence.pages.clear()
