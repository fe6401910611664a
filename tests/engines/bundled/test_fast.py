"""Verify-and-rollback decoding: the fast path errs, nobody can tell; chosen per request, beside everything else."""

import itertools

import numpy as np
import pytest
from engine_cases import ScriptedArithmetic, evidence, greedy, options, request, run_all

from engines.bundled.arithmetic import open_arithmetic
from engines.bundled.draft import open_drafter
from engines.bundled.engine import Engine
from engines.bundled.errors import NotSupported
from engines.bundled.fast import in_bfloat16, open_fast_path
from engines.bundled.kernels.library import load
from engines.bundled.models.tiny import TinySource

MODEL = TinySource().model()
KERNELS = load("auto", "auto")
TURNS = [5, 9, 5, 9, 5, 9, 5, 9, 5, 9]
WINDOW = 6


def open_engine(**changes):
    config = options(**{"num_pages": 64, "draft_length": WINDOW, "max_num_batched_tokens": 32, **changes})
    arithmetic = open_arithmetic(MODEL, config)
    return Engine(
        MODEL.config, config, arithmetic, KERNELS, str, drafter=open_drafter(MODEL, config, KERNELS),
        fast=open_fast_path(MODEL, config, KERNELS, arithmetic),
    )  # fmt: skip


def wild(index, **changes):
    """A request whose draws are nearly even, so that the fast path is often wrong."""
    sampling = greedy(temperature=1.5, seed=index, max_tokens=30 + index, logprobs=5)
    return request(f"r{index}", [*TURNS[index % 5 :], index], sampling, logits_digest=True, **changes)


REQUESTS = [wild(i, rollback=i % 3 != 2) for i in range(6)]
PLAIN = [evidence(sequence) for sequence in run_all(open_engine(), REQUESTS)]


def of(sequences, what):
    return [getattr(sequence, what) > 0 for sequence in sequences]


@pytest.mark.parametrize(("who", "chosen"), [("all", [1] * 6), ("request", [1, 1, 0, 1, 1, 0])])
def test_chosen_requests_err_are_rolled_back_and_get_what_they_get_without(who, chosen):
    engine = open_engine(rollback=who)
    sequences = run_all(engine, REQUESTS, [0, 0, 1, 4, 6, 6])
    assert [evidence(sequence) for sequence in sequences] == PLAIN
    for what in ("drafted", "accepted", "rollbacks"):
        assert of(sequences, what) == [bool(one) for one in chosen], what
    assert engine.fast.tokens >= sum(sequence.drafted for sequence in sequences)


def test_a_step_mixes_full_windows_ordinary_decoding_proposals_of_the_text_and_prompts():
    engine = open_engine(rollback="request", draft="lookup", max_num_seqs=6)
    sequences = run_all(engine, REQUESTS, [0, 0, 1, 4, 6, 9])
    assert [evidence(sequence) for sequence in sequences] == PLAIN
    kinds = {}
    for ran in engine.log:
        prompt = ran.start < len(ran.sequence.request.prompt) - 1
        window = ran.sequence.fast and ran.count == WINDOW + 1
        lookup = not ran.sequence.fast and not prompt and ran.count > 1
        kinds.setdefault(ran.step, set()).add(
            "prompt" if prompt else "window" if window else "lookup" if lookup else "plain"
        )
    seen = [frozenset(kind) for kind in kinds.values()]
    assert any({"window", "plain"} <= kind for kind in seen)
    assert any({"window", "prompt"} <= kind for kind in seen)
    assert any("lookup" in kind for kind in seen)


def test_a_held_sequence_runs_nothing_until_its_window_is_full():
    engine = open_engine(rollback="all")
    (sequence,) = run_all(engine, [wild(0)])
    decoding = [ran for ran in engine.log if ran.start >= len(sequence.request.prompt)]
    assert {ran.count for ran in decoding[:-1]} == {WINDOW + 1}
    steps = [ran.step for ran in decoding[:-1]]
    assert {later - before for before, later in itertools.pairwise(steps)} == {WINDOW}
    assert len(decoding) < sequence.generated


@pytest.mark.parametrize(
    "changes",
    [
        {"num_pages": 16},
        {"max_num_batched_tokens": 4},
        {"prefix_cache": True, "num_pages": 16},
        {"async_scheduling": True},
        {"async_scheduling": True, "max_num_batched_tokens": 3},
        {"async_scheduling": True, "draft": "lookup", "num_pages": 16},
        {"policy": "priority", "max_num_seqs": 2},
    ],
)
def test_windows_change_no_bit_under_pressure(changes):
    engine = open_engine(rollback="request", **changes)
    requests = [wild(i, rollback=i % 3 != 2, priority=-i) for i in range(6)]
    sequences = run_all(engine, requests, [0, 1, 2, 3, 4, 5])
    assert [evidence(sequence) for sequence in sequences] == PLAIN
    assert sum(sequence.rollbacks > 0 for sequence in sequences if sequence.fast) >= 3
    if "num_pages" in changes or "policy" in changes:
        assert engine.scheduler.preemptions > 0


def test_the_wish_of_a_request_counts_only_where_the_engine_leaves_it_to_requests():
    sequences = run_all(open_engine(), REQUESTS)
    assert not any(of(sequences, "drafted"))


def test_without_verification_the_fast_paths_mistakes_show():
    sequences = run_all(open_engine(rollback="request", fault="unverified"), REQUESTS)
    differs = [evidence(sequence) != plain for sequence, plain in zip(sequences, PLAIN, strict=True)]
    assert differs == [True, True, False, True, True, False]


def test_a_sequence_that_ends_inside_its_window_was_not_wrong():
    """Proposals behind the last token are thrown away, and that is no rollback."""
    plain = greedy(max_tokens=8)
    (whole,) = run_all(open_engine(rollback="all"), [request("r", TURNS, plain)])
    output = whole.tokens[len(TURNS) :]
    assert (whole.rollbacks, whole.drafted) == (0, WINDOW), "the window is right from end to end"
    place = next(i for i in range(2, WINDOW) if output[i] not in output[:i])
    (stopped,) = run_all(
        open_engine(rollback="all"), [request("r", TURNS, greedy(max_tokens=8, stop_token_ids=(output[place],)))]
    )
    assert (stopped.finish_reason, stopped.generated) == ("stop", place + 1)
    assert (stopped.rollbacks, stopped.drafted, stopped.accepted) == (0, WINDOW, place - 1)


def test_a_fast_path_whose_logits_are_no_numbers_proposes_nothing_and_harms_nobody():
    engine = open_engine(rollback="all")
    forward = engine.fast.arithmetic.forward
    engine.fast.arithmetic.forward = lambda batch: forward(batch) * np.float32(np.nan)
    sequences = run_all(engine, REQUESTS)
    assert [evidence(sequence) for sequence in sequences] == PLAIN
    assert not any(of(sequences, "drafted"))


def test_memory_that_runs_out_on_the_fast_path_is_an_error_and_recoverable():
    engine = open_engine(rollback="all")
    sequences = [engine.submit(one) for one in REQUESTS[:3]]
    engine.step()
    forward = engine.fast.arithmetic.forward
    engine.fast.arithmetic.forward = lambda batch: (_ for _ in ()).throw(MemoryError("no page"))
    with pytest.raises(Exception, match=r"step 1 of the fast path: memory ran out \(no page\); lower"):
        engine.step()
    engine.fast.arithmetic.forward = forward
    engine.recover()
    while engine.has_work:
        engine.step()
    engine.check_pages()
    assert [evidence(sequence) for sequence in sequences] == PLAIN[:3]


def test_bfloat16_keeps_sixteen_bits():
    weight = in_bfloat16(MODEL).weights["model.norm.weight"]
    assert not (weight.view("u4") & 0xFFFF).any()
    assert abs(weight / MODEL.weights["model.norm.weight"] - 1).max() <= 2**-8


def test_pages_are_shared_with_the_target_and_with_nobody_else():
    engine = open_engine(rollback="all")
    assert engine.fast.arithmetic.pages is engine.arithmetic.pages
    config = options(rollback="all")
    told = r"rollback = all on arithmetic scripted .* use arithmetic portable, free or tensorcore"
    with pytest.raises(NotSupported, match=told):
        open_fast_path(MODEL, config, KERNELS, ScriptedArithmetic(MODEL.config, config))
