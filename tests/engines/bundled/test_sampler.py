"""The sampler against a literal reading of docs/numerics.md, and its frequencies against the distribution."""

from collections import Counter

import numpy as np
import pytest
from engine_cases import greedy, kernels, request
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.bundled.errors import ComputeError
from engines.bundled.philox import TARGET_STREAM, uniform
from engines.bundled.sampler import pick, shape
from engines.bundled.sequence import Position, Sequence

F = np.float32
VOCAB = 40


def make(sampling, prompt=(1, 2, 3), output=(), stop_ids=(), sample=0):
    """A sequence that has generated `output`."""
    sequence = Sequence(request("r", prompt, sampling, sample=sample), frozenset(stop_ids), lambda ids: "")
    for token in output:
        sequence.append(Position(token, token, 0.0, np.empty(0, np.int32), np.empty(0, np.float32), None))
    return sequence


def literal_shape(logits, sampling, prompt, output, stop_ids):
    """Penalties, bias and mask, one id and one rounding at a time."""
    row = [F(x) for x in logits]
    for token in range(len(row)):
        x = row[token]
        if token in prompt or token in output:
            r = F(sampling.repetition_penalty)
            x = F(x / r) if x > 0 else F(x * r)
        count = output.count(token)
        if count:
            x = F(x - F(F(count) * F(sampling.frequency_penalty)))
            x = F(x - F(sampling.presence_penalty))
        for biased, bias in sampling.logit_bias:
            if biased == token:
                x = F(x + F(bias))
        if len(output) < sampling.min_tokens and token in stop_ids:
            x = F(-np.inf)
        row[token] = x
    return row


def literal_draw(row, sampling, u):
    """Temperature, top-k, top-p, min-p and the draw, one candidate at a time."""
    largest = max(row)
    scaled = [F(F(x - largest) / F(sampling.temperature)) for x in row]
    weights = kernels().exp(np.array(scaled, F))
    order = sorted((i for i in range(len(row)) if row[i] > -np.inf), key=lambda i: (-row[i], i))
    order = [i for i in order if weights[i] > 0][: sampling.top_k or None]
    total = chain(weights[i] for i in order)
    kept, running = [], F(0)
    for i in order:
        kept.append(i)
        running = F(running + weights[i])
        if running >= F(F(sampling.top_p) * total):
            break
    kept = [i for i in kept if weights[i] >= F(F(sampling.min_p) * weights[order[0]])]
    target, running = F(F(u) * chain(weights[i] for i in kept)), F(0)
    for i in kept:
        running = F(running + weights[i])
        if running > target:
            return i
    return kept[-1]


def chain(weights):
    """A sum from left to right, rounded at each step."""
    total = F(0)
    for weight in weights:
        total = F(total + weight)
    return total


def bits(row):
    return np.array(row, F).view(np.int32).tolist()


samplings = st.builds(
    greedy,
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.7]),
    frequency_penalty=st.sampled_from([0.0, 0.4, -0.3]),
    presence_penalty=st.sampled_from([0.0, 0.9, -0.2]),
    logit_bias=st.sampled_from([(), ((3, 1.7), (0, -2.3))]),
    min_tokens=st.sampled_from([0, 2]),
    max_tokens=st.just(50),
    seed=st.integers(0, 2**64 - 1),
    top_k=st.sampled_from([0, 1, 7]),
    top_p=st.sampled_from([1.0, 0.9, 0.4]),
    min_p=st.sampled_from([0.0, 0.05, 0.3]),
)
rows = st.lists(st.floats(-8, 8, width=32), min_size=VOCAB, max_size=VOCAB)
outputs = st.lists(st.integers(0, VOCAB - 1), max_size=6)


@settings(deadline=None, max_examples=150)
@given(rows, samplings, outputs)
def test_shaping_is_the_written_order_bit_for_bit(logits, sampling, output):
    sequence = make(sampling, output=output, stop_ids=(5, 6))
    expected = literal_shape(logits, sampling, (1, 2, 3), output, (5, 6))
    assert bits(shape(np.array(logits, F), sequence)) == bits(expected)


@settings(deadline=None, max_examples=150)
@given(rows, samplings, outputs, st.sampled_from([0.5, 1.0, 1.7]))
def test_a_pick_is_the_written_draw(logits, sampling, output, temperature):
    sampling = type(sampling)(**{**fields(sampling), "temperature": temperature})
    sequence = make(sampling, output=output, stop_ids=(5, 6), sample=2)
    row = literal_shape(logits, sampling, (1, 2, 3), output, (5, 6))
    u = uniform(sampling.seed, 3 + len(output), 2, TARGET_STREAM)
    assert pick(np.array(logits, F), sequence, kernels()) == literal_draw(row, sampling, u)


def fields(sampling):
    return {name: getattr(sampling, name) for name in sampling.__slots__}


def test_temperature_0_is_the_lowest_of_the_largest():
    row = np.array([0.0, 5.0, 5.0, -0.0], F)
    assert pick(row, make(greedy()), kernels()) == 1


def test_repetition_alone_covers_the_prompt():
    row = np.full(VOCAB, 2.0, F)
    shaped = shape(row, make(greedy(repetition_penalty=2.0, frequency_penalty=0.5, presence_penalty=0.25)))
    assert shaped[[1, 2, 3]].tolist() == [1.0, 1.0, 1.0]
    assert shaped[0] == 2.0
    assert row.tolist() == [2.0] * VOCAB, "raw logits must stay as they were"


def test_stop_ids_are_masked_until_min_tokens_are_there():
    row = np.zeros(VOCAB, F)
    sampling = greedy(min_tokens=2)
    assert shape(row, make(sampling, output=(9,), stop_ids=(5,)))[5] == -np.inf
    assert shape(row, make(sampling, output=(9, 9), stop_ids=(5,)))[5] == 0


@pytest.mark.parametrize(
    ("changes", "found"),
    [({"logit_bias": ((3, 3e38),)}, "inf"), ({"min_tokens": 1}, "-inf")],
)
def test_parameters_that_leave_no_finite_candidate_are_an_error(changes, found):
    row = np.full(VOCAB, 3e38, F)
    with pytest.raises(ComputeError, match=rf"request 'r', generated position 0: .* is {found}"):
        pick(row, make(greedy(**changes), stop_ids=range(VOCAB)), kernels())


@pytest.mark.parametrize(
    ("changes", "kept"),
    [({}, 12), ({"top_k": 5}, 5), ({"top_p": 0.9}, 7), ({"min_p": 0.05}, 7), ({"temperature": 0.6}, 12)],
)
def test_frequencies_follow_the_distribution(changes, kept):
    """Chi-square of 4,000 draws with seeds 0 to 3,999, against float64 probabilities; fixed, so it cannot flake."""
    row = np.random.default_rng(3).normal(0, 0.8, 12).astype(F)
    temperature = changes.get("temperature", 1.0)
    expected = distribution(row.astype(np.float64) / temperature, changes)
    assert (expected > 0).sum() == kept
    drawn = Counter(
        pick(row, make(greedy(**{"temperature": 1.0, **changes}, seed=seed)), kernels()) for seed in range(4000)
    )
    counts = np.array([drawn[token] for token in range(12)])
    assert counts[expected == 0].sum() == 0
    alive = expected > 0
    statistic = ((counts[alive] - 4000 * expected[alive]) ** 2 / (4000 * expected[alive])).sum()
    assert statistic < CHI_SQUARE_999[alive.sum() - 1]


CHI_SQUARE_999 = {  # 99.9 % points by degrees of freedom
    1: 10.83, 2: 13.82, 3: 16.27, 4: 18.47, 5: 20.52, 6: 22.46, 7: 24.32, 8: 26.12, 9: 27.88, 10: 29.59, 11: 31.26,
}  # fmt: skip


def distribution(scaled, changes):
    """Probabilities in float64 after top-k, top-p and min-p."""
    weights = np.exp(scaled - scaled.max())
    order = np.argsort(-weights, kind="stable")
    keep = order[: changes.get("top_k") or None]
    cumulative = np.cumsum(weights[keep])
    keep = keep[: int(np.searchsorted(cumulative, changes.get("top_p", 1.0) * cumulative[-1])) + 1]
    keep = keep[weights[keep] >= changes.get("min_p", 0.0) * weights.max()]
    result = np.zeros_like(weights)
    result[keep] = weights[keep] / weights[keep].sum()
    return result
