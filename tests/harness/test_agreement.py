"""Agreement of logprobs: exact where the bits are equal, else the estimates' own definitions, by position too."""

import math

import numpy as np
import pytest
from made_traces import make_traces, with_positions

from harness.agreement import measure_agreement
from harness.judged import ComparisonError


def traces(*logprobs, lengths=(3, 2), token=None):
    made = make_traces(lengths=lengths)
    columns = {"logprob": np.array(logprobs, np.float32)}
    return with_positions(made, **columns, **({} if token is None else {"token": np.array(token, np.int32)}))


def test_equal_bits_are_exactly_no_divergence():
    one = traces(-0.5, -1.25, -2.0, -0.1, -3.0)
    found = measure_agreement(one, one)
    assert (found.tokens, found.equal) == (5, 5)
    assert (found.kl_k1, found.kl_k3, found.max_delta, found.mean_delta) == (0.0, 0.0, 0.0, 0.0)
    assert math.copysign(1, found.kl_k1) == 1
    assert (found.perplexity_ratio, found.pearson) == (1.0, 1.0)
    assert [(row.position, row.tokens, row.most) for row in found.by_position] == [
        (0, 2, 0.0),
        (1, 2, 0.0),
        (2, 1, 0.0),
    ]


def test_the_estimates_are_their_definitions():
    a, b = (-0.5, -1.0, -2.0, -0.25, -3.0), (-0.5, -1.5, -2.0, -0.25, -2.75)
    found = measure_agreement(traces(*a), traces(*b))
    d = [y - x for x, y in zip(a, b, strict=True)]
    assert found.equal == 3
    assert found.kl_k1 == pytest.approx(-sum(d) / 5)
    assert found.kl_k3 == pytest.approx(sum(math.exp(x) - 1 - x for x in d) / 5)
    assert (found.max_delta, found.mean_delta) == (0.5, pytest.approx(0.15))
    likelihood = math.exp(-sum(b) / 5) / math.exp(-sum(a) / 5)
    assert found.perplexity_ratio == pytest.approx(likelihood)
    assert found.pearson == pytest.approx(np.corrcoef(a, b)[0, 1])
    assert [(row.mean, row.most) for row in found.by_position] == [(0.0, 0.0), (0.375, 0.5), (0.0, 0.0)]


def test_a_zero_of_the_other_sign_is_not_the_same_bits():
    found = measure_agreement(traces(0.0, -1.0, -2.0, -1.0, -1.0), traces(-0.0, -1.0, -2.0, -1.0, -1.0))
    assert (found.equal, found.max_delta) == (4, 0.0)


def test_other_tokens_are_left_out_and_nothing_in_common_is_an_error():
    one = traces(-1.0, -1.0, -1.0, -1.0, -1.0, token=[1, 2, 3, 4, 5])
    found = measure_agreement(one, traces(-9.0, -1.0, -1.0, -1.0, -1.5, token=[9, 2, 3, 4, 5]))
    assert (found.tokens, found.max_delta) == (4, 0.5)
    assert found.pearson is None  # one side never varies
    with pytest.raises(ComparisonError, match="no token"):
        measure_agreement(one, traces(*[-1.0] * 5, token=[9] * 5))


def test_no_logprobs_and_no_numbers_give_no_agreement():
    one = traces(-1.0, -1.0, -1.0, -1.0, -1.0)
    assert measure_agreement(one, with_positions(one, logprob=None)) is None
    assert measure_agreement(one, traces(-1.0, float("nan"), -1.0, -1.0, -1.0)) is None
