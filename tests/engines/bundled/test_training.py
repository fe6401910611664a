"""The trainer's forward: near transformers' logits, independent of company up to rounding, and no silent misuse."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import transformers

from engines.bundled.errors import NotSupported
from engines.bundled.models.catalogue import open_source
from engines.bundled.training import MICRO_BATCH, PACKED_TOKENS, Text, TrainingForward, group_texts


def texts(model, lengths=(5, 33, 17, 64)):
    rng = np.random.default_rng(1)
    return [Text(tuple(rng.integers(0, model.config.vocab_size, n).tolist()), n // 2, n) for n in lengths]


@pytest.fixture(scope="module")
def tiny():
    return open_source("tiny").model()


def reference(model, text):
    """Logits of transformers' Llama with the same weights."""
    c = model.config
    config = transformers.LlamaConfig(
        vocab_size=c.vocab_size, hidden_size=c.hidden_size, intermediate_size=c.intermediate_size,
        num_hidden_layers=c.num_hidden_layers, num_attention_heads=c.num_attention_heads,
        num_key_value_heads=c.num_key_value_heads, head_dim=c.head_dim, rms_norm_eps=c.rms_norm_eps,
        rope_theta=c.rope_theta, tie_word_embeddings=c.tie_word_embeddings,
        max_position_embeddings=c.max_position_embeddings,
    )  # fmt: skip
    module = transformers.LlamaForCausalLM(config).eval()
    state = {name: torch.tensor(array) for name, array in model.weights.items()}
    missing = module.load_state_dict(state, strict=False).missing_keys
    assert missing == ["lm_head.weight"]  # tied
    with torch.no_grad():
        return module(torch.tensor([text.ids])).logits[0, text.begin : text.end].numpy()


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_logits_are_near_transformers(tiny, layout):
    several = texts(tiny)
    found = list(TrainingForward(tiny, layout).logits(several))
    assert len(found) == len(several)
    for text, logits in zip(several, found, strict=True):
        assert logits.shape == (text.end - text.begin, tiny.config.vocab_size)
        np.testing.assert_allclose(logits, reference(tiny, text), atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_a_text_does_not_see_its_neighbours(tiny, layout):
    several = texts(tiny)
    others = [several[0], *texts(replace(tiny, config=replace(tiny.config, vocab_size=90)), (40, 12, 80))]
    here, there = (next(TrainingForward(tiny, layout).logits(group)) for group in (several, others))
    np.testing.assert_allclose(here, there, atol=1e-5)


def test_groups_hold_every_text_once_within_their_limits():
    several = [Text(tuple(range(n)), 0, 1) for n in (900, 900, 900, 3000, 10, 10)]
    packed = list(group_texts(several, "packed"))
    assert [text for group in packed for text in group] == several
    assert all(len(group) == 1 or sum(len(t.ids) for t in group) <= PACKED_TOKENS for group in packed)
    padded = list(group_texts(several * 3, "padded"))
    assert [len(group) for group in padded] == [MICRO_BATCH, MICRO_BATCH, 2]


def test_a_family_it_does_not_know_is_refused():
    with pytest.raises(NotSupported, match="Qwen3MoeForCausalLM"):
        TrainingForward(open_source("tiny-moe").model(), "padded")
