"""A cache axis on an engine that can empty its cache: one process, each case after a reset, and said so."""

import dataclasses

import pytest

from engines.bundled_adapter import BundledAdapter
from harness.axis import AXES
from harness.capture import CACHE_AS_LEFT, CACHE_EMPTIED, CACHE_STATE, Capture
from harness.engine import Field
from harness.judge import _Arms, _nonce_mistake
from harness.matrix import load_matrix
from harness.plan import Subject, make_plan


class Resetting(BundledAdapter):
    """The bundled adapter, if its engine could empty its cache."""

    def axes(self):
        axes = dict(super().axes())
        return axes | {"cached_prefix": dataclasses.replace(axes["cached_prefix"], resets=True)}


def lifetimes(adapter):
    plan = make_plan(load_matrix("scheduler"), Subject(adapter=adapter, model="tiny", overrides={}))
    pair = next(pair for pair in plan.pairs if pair.label == "cached-prefix[cold-warm]")
    return [plan.cases[case].lifetime for case in (pair.reference, pair.floor, pair.varied)]


def test_without_a_reset_every_arm_has_a_process_of_its_own():
    assert len({lifetime.id for lifetime in lifetimes(BundledAdapter())}) == 3
    assert not any(lifetime.resets for lifetime in lifetimes(BundledAdapter()))


def test_with_a_reset_they_share_one():
    assert len({lifetime.id for lifetime in lifetimes(Resetting())}) == 1
    assert all(lifetime.resets for lifetime in lifetimes(Resetting()))


def arms(*states):
    def capture(number, state):
        field = Field(name=CACHE_STATE, value=state, field_class="lineage", source="worker")
        return Capture(case="c", traces=None, requested={}, resolved={}, observed={}, subject=(field,),
                       process_nonce="one", repetition_nonce=str(number), session="s", judged_digest="",
                       seconds=0.0)  # fmt: skip

    return _Arms(**{
        name: capture(number, state)
        for number, (name, state) in enumerate(zip(("reference", "floor", "varied"), states, strict=True))
    })  # fmt: skip


def test_one_process_is_accepted_when_every_arm_began_with_an_empty_cache():
    assert _nonce_mistake(arms(CACHE_EMPTIED, CACHE_EMPTIED, CACHE_EMPTIED), AXES["cached_prefix"]) is None


@pytest.mark.parametrize("place", range(3))
def test_one_arm_that_was_not_emptied_is_a_mistake(place):
    states = [CACHE_EMPTIED] * 3
    states[place] = CACHE_AS_LEFT
    assert "fresh lifetime" in _nonce_mistake(arms(*states), AXES["cached_prefix"])


def test_an_empty_cache_is_no_fresh_process():
    """What an engine served before may live on elsewhere than in its prefix cache."""
    assert "fresh lifetime" in _nonce_mistake(arms(*[CACHE_EMPTIED] * 3), AXES["server_history"])
