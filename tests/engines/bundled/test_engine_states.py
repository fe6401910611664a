"""Random lives of an engine on the tiny model: arrive, cancel, preempt, hit, restart; each request as it is alone.

Some arrive more urgent than those that run and take their seats, some ask for the fast path and verification, some
get proposals from the text, every fourth follows a grammar. Requests are short and share beginnings, the pool is
small, and the engine is started anew with other options every now and then, with the old one's prefix cache or
without. `Totals.judged` counts what was compared.
"""

import functools
import hashlib
from pathlib import Path

import pytest
from engine_cases import evidence, greedy, kernels, options, request
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from engines.bundled.arithmetic import open_arithmetic
from engines.bundled.cache_store import restore_cache, save_cache
from engines.bundled.draft import open_drafter
from engines.bundled.engine import Engine
from engines.bundled.fast import FastPath, open_fast_path
from engines.bundled.grammar import Grammars
from engines.bundled.models.tiny import TinySource
from engines.bundled.request import Grammar

MODEL = TinySource().model()
DECODE = TinySource().tokenizer().decode
GRAMMARS = Grammars(TinySource().tokenizer(), MODEL.config.vocab_size, MODEL.config.eos_token_ids)
NUMBER, WORDS = Grammar(kind="regex", text="[0-9]{1,4}"), Grammar(kind="ebnf", text='start: ("ab" | "ba" | "b")+')
KINDS = 96
PAGES, PAGE = 14, 4
REQUIRED = 10_000
LIVES = 160


@functools.cache
def kind(index: int):
    """Request `index` of a fixed set: 2 to 33 prompt tokens, 1 to 5 new ones; eight of each share a beginning."""
    noise = hashlib.sha256(f"state {index}".encode()).digest()
    shared = hashlib.sha256(f"shared {index // 8}".encode()).digest()[: noise[0] % 17]
    prompt = [byte * 2 % 512 for byte in (*shared, *noise[1 : 3 + noise[1] % 14])]
    seed = noise[2] if noise[3] % 2 else None
    sampling = greedy(
        max_tokens=1 + noise[4] % 5, temperature=0.0 if seed is None else 0.9, seed=seed, logprobs=noise[5] % 3,
        repetition_penalty=1.0 if noise[6] % 3 else 1.2, ignore_eos=bool(noise[7] % 4) and index % 4 > 0,
    )  # fmt: skip
    return prompt, sampling, (None if index % 4 else (NUMBER, WORDS)[noise[8] % 2])


def make(index: int, name: str, priority: int = 0, *, rollback: bool = False):
    prompt, sampling, grammar = kind(index)
    return request(name, prompt, sampling, grammar=grammar, logits_digest=True, priority=priority, rollback=rollback)


@functools.cache
def arithmetic(pages: int, page_size: int):
    """One arithmetic per shape of the pool; whoever used it before leaves garbage in its pages."""
    return open_arithmetic(MODEL, options(num_pages=pages, page_size=page_size))


@functools.cache
def fast_arithmetic(pages: int, page_size: int):
    """The fast path's own, over the pages of the other."""
    config = options(num_pages=pages, page_size=page_size, rollback="request")
    return open_fast_path(MODEL, config, kernels(), arithmetic(pages, page_size)).arithmetic


def open_engine(**changes) -> Engine:
    config = options(**{"num_pages": PAGES, "page_size": PAGE, **changes})
    shape = (config.num_pages, config.page_size)
    fast = FastPath(fast_arithmetic(*shape), kernels(), config) if config.rollback != "off" else None
    return Engine(
        MODEL.config, config, arithmetic(*shape), kernels(), DECODE, model_digest=MODEL.digest,
        drafter=open_drafter(MODEL, config, kernels()), fast=fast, grammars=GRAMMARS,
    )  # fmt: skip


@functools.cache
def alone(index: int):
    engine = Engine(MODEL.config, options(num_pages=32), arithmetic(32, PAGE), kernels(), DECODE, grammars=GRAMMARS)
    sequence = engine.submit(make(index, "alone"))
    while engine.has_work:
        engine.step()
    return evidence(sequence)


class Totals:
    """What all lives together came to."""

    def __init__(self):
        self.judged = self.cancelled = self.preempted = self.hit = self.restored = self.ahead = self.carried = 0
        self.gave_way = self.rolled_back = self.ahead_with_proposals = 0


class Life(RuleBasedStateMachine):
    """One engine after another; what is common to all lives stands in the class."""

    totals: Totals
    folder: Path
    fault: str

    def __init__(self):
        super().__init__()
        self.engine = open_engine(prefix_cache=True, fault=self.fault, policy="priority", rollback="request")
        self.under_way = {}
        self.submitted = 0

    @rule(
        indices=st.lists(st.integers(0, KINDS - 1), min_size=2, max_size=12),
        priority=st.integers(-1, 1),
        rollback=st.booleans(),
    )
    def arrive(self, indices, priority, rollback):
        for index in indices:
            self._submit(index, priority, rollback=rollback)

    @rule(index=st.integers(0, KINDS - 1), count=st.integers(2, 4))
    def arrive_again_and_again(self, index, count):
        for _ in range(count):
            self._submit(index, 0)

    @rule(indices=st.lists(st.integers(0, KINDS - 1), min_size=4, max_size=6), urgent=st.integers(0, KINDS - 1))
    def arrive_and_be_outranked(self, indices, urgent):
        for index in indices:
            self._submit(index, 2, rollback=index % 2 == 0)
        self._step()
        self._submit(urgent, -2)
        self._step()

    @rule(count=st.integers(1, 12))
    def run(self, count):
        for _ in range(count):
            self._step()

    @rule(choice=st.integers(0, 10**6))
    def cancel(self, choice):
        names = sorted(self.under_way)
        if names:
            name = names[choice % len(names)]
            del self.under_way[name]
            assert self.engine.abort(name) == 1
            self.totals.cancelled += 1

    @rule(
        seats=st.integers(1, 8), tokens=st.sampled_from([3, 16, 64]), ahead=st.booleans(), carry=st.booleans(),
        policy=st.sampled_from(["fcfs", "priority", "priority", "shortest"]), pages=st.sampled_from([11, 14, 40]),
        rollback=st.sampled_from(["off", "request", "all"]), lookup=st.booleans(),
    )  # fmt: skip
    def restart(self, seats, tokens, ahead, carry, policy, pages, rollback, lookup):
        self._finish()
        store = self.folder / "cache"
        if carry:
            self.totals.carried += save_cache(self.engine, store)
        self.engine = open_engine(
            prefix_cache=True, fault=self.fault, max_num_seqs=seats, max_num_batched_tokens=tokens,
            async_scheduling=ahead, policy=policy, num_pages=pages, rollback=rollback,
            draft="lookup" if lookup and rollback != "all" else "off",
        )  # fmt: skip
        if carry:
            restore_cache(self.engine, store)

    @invariant()
    def pages_add_up(self):
        pages, held = self.engine.scheduler.pages, set()
        for sequence in self.engine.scheduler.unfinished:
            held.update(sequence.pages)
        assert pages.free + len(held) == pages.count

    def teardown(self):
        self._finish()
        if self.engine.ahead:
            self.engine.ahead.close()

    def _submit(self, index, priority, *, rollback=False):
        name = f"r{self.submitted}"
        self.submitted += 1
        self.engine.submit(make(index, name, priority, rollback=rollback))
        self.under_way[name] = index

    def _step(self):
        if self.engine.has_work:
            for sequence in self.engine.step():
                self._judge(sequence, self.under_way.pop(sequence.request.id))
                self.totals.judged += 1
                self.totals.hit += sequence.cached_tokens > 0
                self.totals.preempted += sequence.preemptions > 0
                self.totals.rolled_back += sequence.fast and sequence.rollbacks > 0
                self.totals.ahead_with_proposals += self.engine.ahead is not None and sequence.drafted > 0
                self.totals.restored += sequence.restored_tokens > 0

    def _judge(self, sequence, index):
        if evidence(sequence) != alone(index):
            self.under_way.clear()
            self.engine.reset()  # so that the end of this life has nothing to say
            pytest.fail(f"request of kind {index} is not what it is alone")

    def _finish(self):
        while self.engine.has_work:
            self._step()
        assert not self.under_way
        self.engine.check_pages()
        self.totals.gave_way += self.engine.scheduler.gave_way
        self.engine.scheduler.gave_way = 0
        if self.engine.ahead:
            self.totals.ahead += self.engine.ahead.planned_steps


def live(totals, folder, lives, fault="none"):
    profile = settings(
        max_examples=lives, stateful_step_count=40, deadline=None, derandomize=True, database=None,
        suppress_health_check=list(HealthCheck), print_blob=False, phases=[Phase.generate],
    )  # fmt: skip
    run_state_machine_as_test(
        type("Life", (Life,), {"totals": totals, "folder": folder, "fault": fault}), settings=profile
    )


def test_ten_thousand_requests_in_random_lives_get_what_they_get_alone(tmp_path):
    totals = Totals()
    live(totals, tmp_path, LIVES)
    assert totals.judged >= REQUIRED
    assert min(totals.cancelled, totals.preempted, totals.hit, totals.restored, totals.ahead, totals.carried) >= 100
    assert min(totals.gave_way, totals.rolled_back, totals.ahead_with_proposals) >= 100


@pytest.mark.parametrize("fault", ["stale-page", "lost-flush", "short-hash", "misplaced-page"])
def test_random_lives_notice_every_fault(fault, tmp_path):
    with pytest.raises(pytest.fail.Exception, match="is not what it is alone"):
        live(Totals(), tmp_path, 60, fault)
