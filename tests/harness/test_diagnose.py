"""The layer a difference belongs to, and the five lines that say so."""

from __future__ import annotations

import pytest
from made_traces import copy_traces, make_traces, with_positions, with_requests

from harness.compare import compare
from harness.diagnose import diagnose


def pair(**moved):
    """Two captures; the variant's named columns move at request b, position 1."""
    a = make_traces(("a", "b"), (3, 3))
    b = copy_traces(a)
    for name, by in moved.items():
        getattr(b.positions, name)[4] += by
    return a, b


@pytest.mark.parametrize(
    ("moved", "rule", "replay", "home", "layer"),
    [
        ({"logprob": -1}, "topk", "golden", "forward", "forward"),
        ({"topk_logprobs": -1}, "topk", "natural", "sampling", "forward"),
        ({"logprob": -1}, "logprobs", "golden", "parallelism", "parallelism"),
        ({"logprob": -1}, "logprobs", "golden", "environment", "environment"),
        ({"pick": 1}, "topk", "golden", "forward", "sampling"),
        ({"pick": 1}, "logprobs", "golden", "forward", "sampling"),
        ({"token": 1, "pick": 1, "logprob": -1}, "topk", "natural", "forward", "sampling"),
        ({"token": 1, "pick": 1}, "tensors", "natural", "forward", "sampling"),
        ({"pick": 1}, "tokens", "golden", "environment", "environment"),
        ({"token": 1, "pick": 1}, "logprobs", "natural", "forward", "forward"),
    ],
)
def test_layers(moved, rule, replay, home, layer):
    a, b = pair(**moved)
    assert diagnose(compare(a, b, rule, replay), home).layer == layer


def test_an_output_that_only_ends_elsewhere_is_sampling():
    a = make_traces()
    b = with_requests(a, finish_reason=("length", "stop"))
    found = diagnose(compare(a, b, "topk", "natural"), "forward")
    assert found.layer == "sampling"
    assert "only where the output ends differs" in found.reason


def test_a_deeper_comparison_tells_what_the_rule_leaves_out():
    a, b = pair(token=1, pick=1, topk_logprobs=-1)
    shallow = compare(a, b, "tokens", "natural")
    assert diagnose(shallow, "sampling").layer == "sampling"
    assert "stands in" in diagnose(shallow, "sampling").reason
    assert diagnose(shallow, "sampling", compare(a, b, "topk", "natural")).layer == "forward"


def test_five_lines():
    a, b = pair(pick=1, logprob=-0.5)
    found = diagnose(compare(a, b, "topk", "golden"), "forward")
    what, first, count, size, layer = found.text.splitlines()
    counted = "the sampler's picks at 1 of 6 positions, chosen logprobs at 1 of 6 positions"
    assert what == f"what: {counted} (rule topk, golden replay)"
    assert first.startswith(f"first: request 'b' position 1: the sampler's picks {a.positions.pick[4]} became ")
    assert "top-1/top-2 gap" in first
    assert count == "count: 1 of 2 requests, 1 of 6 positions"
    assert "0.5 nats" in size
    assert "k1 0.0833" in size
    assert layer == "layer: forward: chosen logprobs differ in the same context, and the axis's home is forward"


def test_nothing_to_measure_is_said():
    a, b = pair(pick=1)
    bare = [with_positions(side, topk_ids=None, topk_logprobs=None, logprob=None) for side in (a, b)]
    assert "size: no logprob of the same token" in diagnose(compare(*bare, "tokens", "golden"), "forward").text


def test_no_difference_has_no_diagnosis():
    a = make_traces()
    with pytest.raises(ValueError, match="no difference"):
        diagnose(compare(a, a, "topk", "natural"), "forward")
