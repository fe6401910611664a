"""Portable logits do not depend on anything but the sequence: every build, thread count, page layout and schedule."""

import os
import subprocess
import sys
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise

import numpy as np
import pytest
from arithmetic_cases import BUILDS, opened, options, pages_for, run_schedule, same, step, tiny_model, tokens
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engines.bundled import twin
from engines.bundled.arithmetic import open_arithmetic
from engines.bundled.config import Model

SHAPES = {
    "4/2 heads of 16": {"heads": 4, "kv_heads": 2, "head_dim": 16},
    "3/1 heads of 32": {"heads": 3, "kv_heads": 1, "head_dim": 32, "hidden": 96, "inner": 200, "seed": 1},
    "2/2 heads of 16, 3 layers": {"heads": 2, "kv_heads": 2, "head_dim": 16, "layers": 3, "vocab": 500, "seed": 2},
}
LENGTHS = (45, 20, 1, 9)


@lru_cache
def reference(shape):
    """A model, some sequences, and the twin's logits of every position of each."""
    model = tiny_model(**SHAPES[shape])
    sequences = [tokens(i, n, model.config.vocab_size) for i, n in enumerate(LENGTHS)]
    return model, sequences, [twin.forward(model, ids) for ids in sequences]


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    shape=st.sampled_from(sorted(SHAPES)),
    build=st.sampled_from(BUILDS),
    threads=st.integers(1, 2),
    page_size=st.sampled_from([8, 16, 32]),
    garbage=st.sampled_from([np.nan, np.inf, -3e38, 1e-40]),
    random=st.randoms(use_true_random=False),
)
def test_logits_depend_on_the_sequence_alone(shape, build, threads, page_size, garbage, random):
    model, sequences, expected = reference(shape)
    settings_ = {"threads": threads, "page_size": page_size, "isa": build[0], "compiler": build[1]}
    arithmetic = opened(model, garbage, **settings_)
    table = pages_for(options(), rows=len(sequences), seed=random.randint(0, 2**31))
    for found, wanted in zip(run_schedule(arithmetic, sequences, table, random), expected, strict=True):
        assert same(found, wanted)


@pytest.mark.parametrize("shape", sorted(SHAPES))
@pytest.mark.parametrize("build", BUILDS, ids="-".join)
def test_one_shot_and_token_by_token_equal_the_twin(shape, build):
    model, sequences, expected = reference(shape)
    for threads in (1, 2):
        how = {"threads": threads, "isa": build[0], "compiler": build[1]}
        at_once = opened(model, **how).forward(step([(0, 0, sequences[0])], pages_for()))
        one_by_one = opened(model, **how)
        single = [one_by_one.forward(step([(0, i, ids[None])], pages_for())) for i, ids in enumerate(sequences[0])]
        assert same(at_once, expected[0])
        assert same(np.concatenate(single), expected[0])


def test_contexts_over_several_key_chunks():
    model = tiny_model(**SHAPES["3/1 heads of 32"])
    ids = tokens(5, 600)
    at_once = opened(model, threads=2).forward(step([(0, 0, ids)], pages_for()))
    pieces, chunked = (0, 100, 101, 355, 357, 512, 600), opened(model, page_size=8)
    found = [chunked.forward(step([(0, a, ids[a:b])], pages_for(seed=3))) for a, b in pairwise(pieces)]
    assert same(np.concatenate(found), at_once)


def test_wanted_chooses_rows():
    model, sequences, expected = reference("4/2 heads of 16")
    batch = step([(0, 0, sequences[0])], pages_for())
    chosen = type(batch)(
        **{n: getattr(batch, n) for n in ("token", "sequence", "position", "page_table")},
        wanted=np.array([3, 44], np.int32),
    )
    assert same(opened(model).forward(chosen), expected[0][[3, 44]])


def test_results_are_fresh_arrays():
    model, sequences, _ = reference("4/2 heads of 16")
    arithmetic = opened(model)
    batch = step([(0, 0, sequences[1])], pages_for())
    first = arithmetic.forward(batch)
    kept = first.copy()
    arithmetic.forward(step([(0, 0, sequences[3])], pages_for()))
    assert same(first, kept)
    assert same(arithmetic.log_softmax(first), twin.log_softmax(first))


def test_biases_and_an_untied_head():
    model = tiny_model(layers=1, vocab=96)
    extra = {
        f"model.layers.0.self_attn.{name}_proj.bias": np.linspace(-1, 1, size, dtype=np.float32)
        for name, size in (("q", 64), ("k", 32), ("v", 32))
    }
    extra["lm_head.weight"] = tiny_model(layers=1, vocab=96, seed=9).weights["model.embed_tokens.weight"]
    config = replace(model.config, qkv_bias=True, tie_word_embeddings=False)
    changed = Model(name="biased", config=config, weights=dict(model.weights) | extra, digest="")
    ids = tokens(1, 12, 96)
    found = opened(changed).forward(step([(0, 0, ids)], pages_for()))
    assert same(found, twin.forward(changed, ids))
    assert not same(found, twin.forward(model, ids))


def test_close_to_transformers():
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    for shape in sorted(SHAPES):
        model, sequences, expected = reference(shape)
        c = model.config
        theirs = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=c.vocab_size,
                hidden_size=c.hidden_size,
                intermediate_size=c.intermediate_size,
                num_hidden_layers=c.num_hidden_layers,
                num_attention_heads=c.num_attention_heads,
                num_key_value_heads=c.num_key_value_heads,
                head_dim=c.head_dim,
                max_position_embeddings=c.max_position_embeddings,
                rms_norm_eps=c.rms_norm_eps,
                tie_word_embeddings=True,
            )
        ).float()
        state = {name: torch.tensor(weight) for name, weight in model.weights.items()}
        missing = theirs.load_state_dict(state, strict=False)
        assert (missing.missing_keys, missing.unexpected_keys) == (["lm_head.weight"], [])
        theirs.tie_weights()
        with torch.no_grad():
            logits = theirs(torch.tensor(sequences[0][None].astype(np.int64))).logits[0].numpy()
        assert np.abs(logits - expected[0]).max() < 1e-4


def test_describe_tells_what_was_resolved():
    model, _, _ = reference("4/2 heads of 16")
    arithmetic = opened(model, threads=2)
    facts = arithmetic.describe()
    assert (arithmetic.name, arithmetic.definition) == ("portable", 1)
    assert facts["backend"] == "kernels"
    assert facts["isa"] in {isa for isa, _ in BUILDS}
    assert (facts["chunk_width"], facts["key_chunk"], facts["threads"], facts["definition"]) == (32, 256, 2, 1)
    assert len(facts["kernels_digest"]) == 64


def test_wrong_weights_are_all_named():
    model, _, _ = reference("4/2 heads of 16")
    weights = dict(model.weights)
    del weights["model.norm.weight"]
    weights["model.layers.1.mlp.up_proj.weight"] = np.zeros((3, 64), np.float32)
    broken = Model(name="broken", config=model.config, weights=weights, digest="")
    words = (
        r"model broken: .*layers\.1\.mlp\.up_proj\.weight: expected \(160, 64\).*got \(3, 64\).*norm.weight: missing"
    )
    for arithmetic in ("portable", "native"):
        with pytest.raises(ValueError, match=words):
            open_arithmetic(broken, options(arithmetic=arithmetic))


def test_an_unknown_arithmetic_is_refused():
    with pytest.raises(ValueError, match="expected one of portable, free, native, got 'exact'"):
        open_arithmetic(reference("4/2 heads of 16")[0], options(arithmetic="exact"))


def test_portable_brings_in_no_torch():
    code = (
        "import sys; sys.path.insert(0, 'tests/engines/bundled'); from arithmetic_cases import *\n"
        "from engines.bundled.arithmetic import open_arithmetic\n"
        "a = open_arithmetic(tiny_model(), options()); a.forward(step([(0, 0, tokens(1, 5))], pages_for()))\n"
        "assert 'torch' not in sys.modules, 'torch was imported'"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
