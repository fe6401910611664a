"""The 8B shape whose weights follow from a seed: listed, refused clearly where it cannot be made, one everywhere."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from matrix_unit import import_interpreted
from presence import missing

try:
    import_interpreted()  # what is imported below brings the kernels in, for the whole process
except ImportError:
    missing("triton", "Triton is not installed; the extra `test` brings it on Linux", module=True)

import torch

from engines.bundled.arithmetic.weights import check_weights
from engines.bundled.config import EngineConfig
from engines.bundled.errors import NotSupported
from engines.bundled.gpu import fit_pages
from engines.bundled.gpu import memory as gpu_memory
from engines.bundled.gpu.interface import GpuMemoryError
from engines.bundled.gpu.tensorcore.weights import PIECE, from_seed
from engines.bundled.models import random_8b
from engines.bundled.models.catalogue import list_models, open_source
from engines.bundled.models.finite import check_weights as check_finite
from engines.bundled_adapter import BundledAdapter
from engines.bundled_lifetime import start_lifetime
from harness.engine import ModelFacts

SMALL = replace(
    random_8b.CONFIG, vocab_size=300, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16,
)  # fmt: skip


def test_it_is_listed_with_what_it_takes():
    (found,) = (listing for listing in list_models() if listing.name == "qwen3-8b-random")
    assert "8B shape" in found.description
    assert found.how_to_get == "made on an NVIDIA GPU with about 20 GiB free: device=cuda, dtype=bfloat16"
    facts = BundledAdapter().model_facts("qwen3-8b-random")
    assert facts == ModelFacts(name="qwen3-8b-random", vocab_size=151936, max_position_embeddings=4096)
    assert 18 < gpu_memory.weight_bytes(random_8b.CONFIG, "bfloat16") / 2**30 < 20


def test_the_cpu_refuses_it_before_a_weight_is_made():
    model = open_source("qwen3-8b-random").model()
    check_finite(model)
    with pytest.raises(NotSupported, match="weights are made on a GPU alone; set device=cuda and dtype=bfloat16"):
        check_weights(model)
    defaults = {setting.name: setting.default for setting in BundledAdapter().settings()}
    with pytest.raises(NotSupported, match="weights are made on a GPU alone"):
        start_lifetime("qwen3-8b-random", {**defaults, "num_pages": 300})


def test_too_small_a_card_is_told_both_numbers(monkeypatch):
    config = EngineConfig(
        arithmetic="native", max_num_seqs=8, max_num_batched_tokens=64, page_size=16, num_pages=300, threads=1,
        isa="auto", compiler="auto", tuning=0, dtype="bfloat16",
    )  # fmt: skip
    monkeypatch.setattr("engines.bundled.gpu.free_bytes", lambda device: 16 << 30)
    with pytest.raises(GpuMemoryError, match=r"about 18\.57 GiB are needed in bfloat16 and 16\.00 GiB are free; end"):
        fit_pages(random_8b.CONFIG, config, "cuda")
    monkeypatch.setattr("engines.bundled.gpu.free_bytes", lambda device: 24 << 30)
    assert fit_pages(random_8b.CONFIG, config, "cuda").num_pages == 300


def test_torch_makes_the_weights_that_numpy_makes(monkeypatch):
    weights = random_8b.SeededWeights(SMALL)
    monkeypatch.setattr("engines.bundled.gpu.tensorcore.weights.PIECE", 5000)
    assert PIECE > 5000
    take = from_seed(weights, "cpu")
    assert len(weights) == len(list(weights)) == 2 + 1 + 2 * 11
    for name, shape in (("lm_head.weight", (300, 64)), ("model.layers.1.mlp.down_proj.weight", (64, 96))):
        made = take(name, shape)
        values = random_8b.matrix_values(weights.start_of(name), 0, made.numel())
        expected = torch.from_numpy(values).to(torch.bfloat16).view(shape)
        assert torch.equal(made.view(torch.int16), expected.view(torch.int16))
        assert abs(float(values.std()) - 0.02) < 0.0003
        assert len(np.unique(values)) > 0.99 * values.size
    assert torch.equal(take("model.norm.weight", (64,)), torch.ones(64, dtype=torch.bfloat16))


def test_the_digest_names_the_rule_and_the_shape():
    first, second = (random_8b.SeededSource(shape).model().digest for shape in (random_8b.CONFIG, SMALL))
    assert len(first) == 64
    assert first != second
    assert first == random_8b.SeededSource().model().digest
