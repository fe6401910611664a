"""Weights that are no numbers: refused by name at the start; past that, the request that meets them and no other."""

import dataclasses

import numpy as np
import pytest
from engine_cases import evidence, greedy, kernels, options, request, run_all

from engines import bundled_lifetime
from engines.bundled.arithmetic import open_arithmetic
from engines.bundled.config import Model
from engines.bundled.engine import Engine
from engines.bundled.errors import ComputeError
from engines.bundled.models.tiny import CONFIG, TinySource
from engines.bundled_adapter import BundledAdapter
from harness.errors import ModelError

TINY = TinySource().model()
POISON = 300  # the id whose embedding is no number
HEALTHY = request("healthy", range(40), greedy(max_tokens=10, temperature=0.9, seed=3))
SICK = request("sick", (5, 6, POISON, 7), greedy(max_tokens=4))


def damaged(name, place, value):
    """The tiny model with one number of one tensor changed."""
    weight = TINY.weights[name].copy()
    weight[place] = value
    return dataclasses.replace(TINY, weights={**TINY.weights, name: weight})


@pytest.mark.parametrize(
    ("name", "place", "value"),
    [
        ("model.layers.1.mlp.up_proj.weight", (3, 7), np.nan),
        ("model.layers.0.input_layernorm.weight", (63,), -np.inf),
        ("model.embed_tokens.weight", (POISON, 0), np.inf),
    ],
)
def test_a_damaged_tensor_is_named_when_the_engine_starts(monkeypatch, name, place, value):
    class Damaged(TinySource):
        def model(self):
            return damaged(name, place, value)

    monkeypatch.setattr(bundled_lifetime, "open_source", lambda model: Damaged())
    with pytest.raises(ModelError) as caught:
        BundledAdapter().start("tiny", {"threads": 1})
    assert f"model 'tiny': weight {name}{list(place)} is {value}, expected a finite number" in str(caught.value)


@pytest.fixture(scope="module")
def untied():
    """The tiny model with an output head of its own, so that a damaged embedding reaches those who read it alone."""
    head = TINY.weights["model.embed_tokens.weight"][::-1].copy()
    config = dataclasses.replace(CONFIG, tie_word_embeddings=False)
    return Model(name="untied", config=config, weights={**TINY.weights, "lm_head.weight": head}, digest="untied")


def open_engine(model, **changes):
    config = options(**{"num_pages": 64, "max_num_batched_tokens": 64, **changes})
    return Engine(model.config, config, open_arithmetic(model, config), kernels(), TinySource().tokenizer().decode)


def run_on(engine):
    while engine.has_work:
        engine.step()


@pytest.mark.parametrize("changes", [{}, {"async_scheduling": True}, {"prefix_cache": True}, {"arithmetic": "native"}])
def test_only_the_request_that_meets_the_damage_ends(untied, changes):
    embedding = untied.weights["model.embed_tokens.weight"].copy()
    embedding[POISON] = np.nan
    sick = dataclasses.replace(untied, weights={**untied.weights, "model.embed_tokens.weight": embedding})
    expected = evidence(run_all(open_engine(untied, **changes), [HEALTHY])[0])
    engine = open_engine(sick, **changes)
    healthy, guilty = engine.submit(HEALTHY), engine.submit(SICK)
    with pytest.raises(ComputeError, match="request 'sick', generated position 0: logit of token 0 is nan") as caught:
        run_on(engine)
    assert caught.value.request_id == "sick"
    engine.recover()
    assert engine.abort("sick") == 1
    run_on(engine)
    engine.check_pages()
    assert guilty.positions == []
    assert evidence(healthy) == expected
    assert evidence(run_all(engine, [HEALTHY])[0]) == expected, "what it left in its pages is read by nobody"
