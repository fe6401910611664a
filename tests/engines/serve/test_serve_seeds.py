"""Where seeds come from: the request, its content, nowhere."""

import dataclasses

import pytest

from engines.bundled.request import Sampling
from engines.serve.errors import ApiError
from engines.serve.seeds import Seeding, derive_seed

DRAWN = Sampling(
    temperature=0.7, top_p=1.0, top_k=0, min_p=0.0, repetition_penalty=1.0, frequency_penalty=0.0,
    presence_penalty=0.0, seed=None, max_tokens=8, min_tokens=0, ignore_eos=False, stop=(), stop_token_ids=(),
    logit_bias=(), logprobs=0,
)  # fmt: skip
PROMPT = (1, 2, 3)
DERIVED = 3897370978904269  # of PROMPT and DRAWN, by derivation 1


def seeding(arithmetic="portable", policy="refuse"):
    return Seeding(arithmetic=arithmetic, policy=policy, draw=lambda: 99)


@pytest.mark.parametrize("arithmetic", ["portable", "tensorcore", "an arithmetic of tomorrow"])
def test_a_draw_without_a_seed_is_refused_where_bits_are_promised(arithmetic):
    with pytest.raises(ApiError, match="send seed, set temperature to 0, or start the server with") as caught:
        seeding(arithmetic).settle(PROMPT, DRAWN)
    assert (caught.value.status, caught.value.param, caught.value.code) == (400, "seed", "seed_required")


def test_the_sources():
    assert seeding().settle(PROMPT, dataclasses.replace(DRAWN, seed=5))[0].seed == 5
    assert seeding().settle(PROMPT, dataclasses.replace(DRAWN, temperature=0.0))[1] == "none"
    assert seeding("free").settle(PROMPT, DRAWN) == (dataclasses.replace(DRAWN, seed=99), "random")
    derived, source = seeding("free", "derive").settle(PROMPT, DRAWN)
    assert (derived.seed, source) == (derive_seed(PROMPT, DRAWN), "derived")


@pytest.mark.parametrize("field", ["max_tokens", "min_tokens", "logprobs"])
def test_what_shapes_no_distribution_moves_no_derived_seed(field):
    assert derive_seed(PROMPT, dataclasses.replace(DRAWN, **{field: 3})) == derive_seed(PROMPT, DRAWN)


@pytest.mark.parametrize(
    ("field", "value"),
    [("temperature", 0.8), ("top_p", 0.9), ("top_k", 4), ("min_p", 0.1), ("repetition_penalty", 1.1),
     ("frequency_penalty", 0.1), ("presence_penalty", 0.1), ("logit_bias", ((4, 1.0),))],
)  # fmt: skip
def test_what_shapes_it_moves_the_seed(field, value):
    assert derive_seed(PROMPT, dataclasses.replace(DRAWN, **{field: value})) != derive_seed(PROMPT, DRAWN)


def test_derivation_one_stays_what_it_is():
    """A changed value here changes what every server that derives seeds answers: raise DERIVATION."""
    assert derive_seed(PROMPT, DRAWN) == DERIVED
    assert derive_seed((1, 2, 4), DRAWN) != DERIVED
    assert 0 <= DERIVED < 2**53
