"""Proposed tokens: what is accepted, and that no position can tell that they were there."""

import pytest
from engine_cases import greedy, options, request

from engines.bundled.arithmetic import open_arithmetic
from engines.bundled.draft import Lookup, first_layers, open_drafter
from engines.bundled.engine import Engine
from engines.bundled.errors import NotSupported
from engines.bundled.fast import open_fast_path
from engines.bundled.kernels.library import load
from engines.bundled.models.tiny import TinySource
from engines.bundled.sequence import Sequence

MODEL = TinySource().model()
TURNS = [5, 9, 5, 9, 5, 9, 5, 9, 5, 9]
SEEDED = greedy(temperature=0.4, seed=3, max_tokens=24, top_k=4)
REQUESTS = [
    request("greedy", TURNS, greedy(max_tokens=24)),
    request("seeded", TURNS[:7], SEEDED),
    request("penalised", TURNS, greedy(max_tokens=20, frequency_penalty=0.3, min_tokens=4, ignore_eos=False)),
]


def run(requests=REQUESTS, **changes):
    """Sequences of the tiny model, all together, in small steps."""
    config = options(**{"num_pages": 64, **changes})
    kernels = load("auto", "auto")
    arithmetic = open_arithmetic(MODEL, config)
    drafter, fast = open_drafter(MODEL, config, kernels), open_fast_path(MODEL, config, kernels, arithmetic)
    engine = Engine(MODEL.config, config, arithmetic, kernels, str, drafter=drafter, fast=fast)
    sequences = [engine.submit(one) for one in requests]
    while engine.has_work:
        engine.step()
    engine.check_pages()
    return sequences


def evidence(sequences):
    return [
        [(p.token, p.pick, p.logprob.hex(), p.topk_ids.tolist(), p.topk_logprobs.tobytes()) for p in sequence.positions]
        for sequence in sequences
    ]


PLAIN = evidence(run())


@pytest.mark.parametrize("length", [1, 3, 9])
@pytest.mark.parametrize("policy", ["fixed", "variable"])
@pytest.mark.parametrize("draft", ["lookup", "model"])
def test_proposals_change_no_bit(draft, policy, length):
    sequences = run(draft=draft, draft_policy=policy, draft_length=length)
    assert evidence(sequences) == PLAIN
    assert sum(sequence.accepted for sequence in sequences) > 0
    assert sum(sequence.rollbacks for sequence in sequences) > 0


@pytest.mark.parametrize(
    "changes",
    [
        {"num_pages": 14},
        {"max_num_batched_tokens": 3},
        {"prefix_cache": True},
        {"async_scheduling": True},
        {"async_scheduling": True, "num_pages": 14, "max_num_batched_tokens": 5},
        {"async_scheduling": True, "max_num_batched_tokens": 3},
        {"async_scheduling": True, "max_num_batched_tokens": 2, "max_num_seqs": 1},
    ],
)
def test_proposals_change_no_bit_under_preemption_in_chunks_and_over_a_cache(changes):
    assert evidence(run(draft="lookup", **changes)) == PLAIN


def test_without_verification_a_wrong_proposal_shows():
    assert evidence(run(draft="lookup", fault="unverified")) != PLAIN


def test_a_forced_path_read_as_a_prompt_has_the_logprobs_of_decoding():
    forced = [
        request(one.id, one.prompt, one.sampling, forced=tuple(row[0] for row in rows))
        for one, rows in zip(REQUESTS, PLAIN, strict=True)
    ]
    sequences = run(forced, scoring="prefill")
    assert evidence(sequences) == PLAIN
    assert [sequence.accepted for sequence in sequences] != [0, 0, 0]
    for tokens, ahead in ((5, False), (5, True), (4, True), (3, True)):
        chunks = {"max_num_batched_tokens": tokens, "num_pages": 14, "async_scheduling": ahead}
        assert evidence(run(forced, scoring="prefill", **chunks)) == PLAIN


def test_lookup_prefers_the_longest_and_the_latest_match():
    def proposed(tokens, count=3):
        return Lookup().propose(Sequence(request("r", tokens, greedy()), frozenset(), str), count)

    assert proposed([1, 2, 3, 7, 9, 3, 8, 1, 2, 3]) == [7, 9, 3]
    assert proposed([3, 1, 3, 2, 3], 1) == [2]
    assert proposed([1, 2, 3]) == []


def test_the_small_model_is_the_first_layers():
    small = first_layers(MODEL)
    assert small.config.num_hidden_layers == 1
    assert set(MODEL.weights) - set(small.weights) == {n for n in MODEL.weights if n.startswith("model.layers.1.")}


@pytest.mark.parametrize(
    "changes",
    [
        {"draft": "lookup", "rollback": "all"},
        {"scoring": "prefill", "draft": "model"},
    ],
)
def test_what_does_not_go_together_is_refused(changes):
    with pytest.raises(NotSupported):
        open_drafter(MODEL, options(**changes), load("auto", "auto"))
