"""The engine on the tiny model: what a request gets depends on its company in `free`, and not in `portable`."""

import functools

import numpy as np
import pytest
from engine_cases import evidence, greedy, kernels, options, request, run_all
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.bundled.arithmetic import open_arithmetic
from engines.bundled.engine import Engine
from engines.bundled.models.tiny import TinySource

MODEL = TinySource().model()
DECODE = TinySource().tokenizer().decode
PROMPTS = [
    tuple(np.random.default_rng(i).integers(0, 512, length).tolist()) for i, length in enumerate((3, 17, 64, 130, 300))
]
SAMPLINGS = [
    greedy(max_tokens=12, logprobs=5),
    greedy(max_tokens=10, logprobs=20, temperature=0.8, seed=5, top_p=0.95, repetition_penalty=1.1),
    greedy(max_tokens=8, logprobs=0, temperature=1.3, seed=2**64 - 1, min_p=0.02, frequency_penalty=0.3),
]
REQUESTS = [
    request(f"r{i}", prompt, SAMPLINGS[i % 3], logits_digest=True)
    for i, prompt in enumerate((*PROMPTS, *PROMPTS[::-1]))
]


def open_engine(page_order=None, **changes):
    config = options(**changes)
    return Engine(MODEL.config, config, open_arithmetic(MODEL, config), kernels(), DECODE, page_order)


@functools.cache
def alone(index, arithmetic="portable"):
    """What request `index` gets when nothing else runs and its prompt is computed at once."""
    engine = open_engine(arithmetic=arithmetic, max_num_batched_tokens=4096, num_pages=256, page_size=16)
    return evidence(run_all(engine, [REQUESTS[index]])[0])


@settings(deadline=None, max_examples=25)
@given(st.data())
def test_every_trace_equals_the_one_alone(data):
    chosen = data.draw(st.lists(st.integers(0, len(REQUESTS) - 1), min_size=1, max_size=6, unique=True))
    page_size = data.draw(st.sampled_from([1, 3, 16, 40]))
    least = max(-(-REQUESTS[i].most_tokens // page_size) for i in chosen)
    pages = least + data.draw(st.integers(0, 12))
    engine = open_engine(
        data.draw(st.permutations(range(pages))),
        max_num_seqs=data.draw(st.integers(1, 6)),
        max_num_batched_tokens=data.draw(st.sampled_from([1, 7, 33, 64, 500])),
        page_size=page_size,
        num_pages=pages,
        threads=data.draw(st.integers(1, 2)),
    )
    arrivals = [data.draw(st.integers(0, 20)) for _ in chosen]
    together = run_all(engine, [REQUESTS[i] for i in chosen], arrivals)
    for index, sequence in zip(chosen, together, strict=True):
        assert evidence(sequence) == alone(index)


def test_preemption_and_chunks_leave_the_bits_alone():
    """A fixed case in which both are sure to happen, so that the property above is no empty promise."""
    engine = open_engine(num_pages=90, page_size=4, max_num_batched_tokens=48, max_num_seqs=6)
    together = run_all(engine, REQUESTS, [2 * i for i in range(len(REQUESTS))])
    assert engine.scheduler.preemptions >= 3
    assert any(ran.start > 0 and ran.count > 1 for ran in engine.log)
    assert [evidence(sequence) for sequence in together] == [alone(i) for i in range(len(REQUESTS))]


def test_forced_along_its_own_tokens_a_request_reports_the_same():
    engine = open_engine(num_pages=256)
    natural = run_all(engine, REQUESTS[:3])
    forced = [
        request(s.request.id, s.request.prompt, s.request.sampling, logits_digest=True, forced=tuple(path))
        for s in natural
        for path in [[p.token for p in s.positions]]
    ]
    engine.reset()
    assert [evidence(s) for s in run_all(engine, forced)] == [evidence(s) for s in natural]


@pytest.mark.parametrize("arithmetic", ["free"])
def test_the_control_differs_in_company(arithmetic):
    engine = open_engine(arithmetic=arithmetic, num_pages=512, page_size=16, max_num_seqs=10)
    together = run_all(engine, REQUESTS)
    differing = [i for i, sequence in enumerate(together) if evidence(sequence) != alone(i, arithmetic)]
    assert len(differing) >= len(REQUESTS) // 2


def test_the_tiny_model_is_worth_sampling():
    """Greedy text does not settle on one token, and the best token is neither certain nor noise."""
    engine = open_engine(num_pages=512)
    long = [request(f"r{i}", prompt, greedy(max_tokens=64)) for i, prompt in enumerate(PROMPTS)]
    for sequence in run_all(engine, long):
        tokens = [position.token for position in sequence.positions]
        assert len(set(tokens)) >= 20
        mean = np.mean([position.topk_logprobs[0] for position in sequence.positions])
        assert -4.5 < mean < -0.5  # uniform over 512 ids would be -6.24
