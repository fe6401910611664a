"""Each family: written by transformers, read here; near transformers' logits, and the twin's bits however it is run."""

import json
import random
from dataclasses import replace

import numpy as np
import pytest
import torch
import transformers
from arithmetic_cases import BUILDS, opened, options, pages_for, run_schedule, same, step, tiny_model
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from engines.bundled import training, twin
from engines.bundled.arithmetic import open_arithmetic
from engines.bundled.arithmetic.rope import inverse_frequencies
from engines.bundled.config import RopeScaling
from engines.bundled.errors import ModelError
from engines.bundled.models.catalogue import open_source
from engines.bundled.models.config_file import config_json, parse_config
from engines.bundled.models.families import FAMILIES

SIZES = {
    "vocab_size": 97, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 6,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "initializer_range": 0.3,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
# Name to (class in transformers, config beside SIZES). Windows are shorter than the sequence.
CASES = {
    "llama": ("Llama", {}),
    "llama, rope llama3": ("Llama", {"rope_parameters": LLAMA3}),
    "llama, rope linear, no KV groups": ("Llama", {"rope_parameters": LINEAR, "num_key_value_heads": 6}),
    "mistral": ("Mistral", {"sliding_window": 7}),
    "mistral, no window": ("Mistral", {"sliding_window": None}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2, window in the second layer": ("Qwen2", {"use_sliding_window": True, "sliding_window": 5,
                                                     "max_window_layers": 1}),
    "qwen3": ("Qwen3", {"head_dim": 12}),
    "qwen3, rope llama3": ("Qwen3", {"rope_parameters": LLAMA3, "tie_word_embeddings": True}),
    "qwen3-moe": ("Qwen3Moe", {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24,
                               "norm_topk_prob": True}),
    "qwen3-moe, a dense layer": ("Qwen3Moe", {"num_experts": 8, "num_experts_per_tok": 4, "mlp_only_layers": [1],
                                              "moe_intermediate_size": 24, "norm_topk_prob": True}),
}  # fmt: skip
LENGTH = 23


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A folder of each case, with what transformers computes for one sequence."""
    made = {}
    for index, (name, (kind, more)) in enumerate(CASES.items()):
        torch.manual_seed(index)
        config = getattr(transformers, f"{kind}Config")(**SIZES | more)
        config._attn_implementation = "eager"
        model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
        for parameter, tensor in model.named_parameters():
            if tensor.ndim == 1:  # norms start as ones and biases as zeros: a mistake in them would not show
                torch.nn.init.uniform_(tensor, *((-0.5, 0.5) if parameter.endswith("bias") else (0.5, 1.5)))
        folder = tmp_path_factory.mktemp("family") / "model"
        model.save_pretrained(folder)
        ids = np.random.default_rng(index).integers(0, SIZES["vocab_size"], LENGTH)
        with torch.no_grad():
            made[name] = folder, ids.astype(np.int32), model(torch.tensor(ids)[None]).logits[0].numpy()
    return made


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SAMEBITS_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize("name", CASES)
def test_portable_is_near_transformers_and_equal_to_the_twin(folders, name):
    folder, ids, expected = folders[name]
    model = open_source(str(folder)).model()
    exact = twin.forward(model, ids)
    assert np.abs(exact - expected).max() < 2e-5 * np.abs(expected).max()
    assert same(opened(model).forward(step([(0, 0, ids)], pages_for())), exact)


@pytest.mark.parametrize("name", ["llama, rope llama3", "mistral", "qwen2", "qwen3", "qwen3-moe"])
def test_bits_do_not_depend_on_pages_chunks_company_or_build(folders, name):
    """Every build in turn, with other page sizes, shuffled pages full of NaN and pieces of any length."""
    folder, ids, _ = folders[name]
    model = open_source(str(folder)).model()
    sequences = [ids, ids[3:20][::-1].copy(), ids[:9]]
    expected = [twin.forward(model, sequence) for sequence in sequences]
    for index, (isa, compiler) in enumerate(BUILDS):
        size = (5, 8, 16)[index % 3]
        arithmetic = opened(model, isa=isa, compiler=compiler, page_size=size, threads=1 + index % 2)
        table = pages_for(options(), rows=3, seed=index)
        computed = run_schedule(arithmetic, sequences, table, random.Random(index))  # noqa: S311 - a schedule
        for found, wanted in zip(computed, expected, strict=True):
            assert same(found, wanted)


@pytest.mark.parametrize("name", ["mistral", "qwen2", "qwen3", "qwen3-moe", "llama, rope linear, no KV groups"])
def test_the_fallback_gives_the_same_bits(folders, name):
    folder, ids, _ = folders[name]
    model = open_source(str(folder)).model()
    found = opened(model, compiler="none").forward(step([(0, 0, ids)], pages_for()))
    assert same(found, twin.forward(model, ids))


@pytest.mark.parametrize("name", CASES)
def test_native_is_near_transformers(folders, name):
    folder, ids, expected = folders[name]
    native = open_arithmetic(open_source(str(folder)).model(), options(arithmetic="native"))
    table = pages_for()
    found = [native.forward(step([(0, 0, ids[:9])], table))]
    found += [native.forward(step([(0, at, ids[at : at + 1])], table)) for at in range(9, LENGTH)]
    assert np.abs(np.concatenate(found) - expected).max() < 2e-5 * np.abs(expected).max()


def test_a_part_that_is_left_out_would_show(folders):
    """Each thing that sets a family apart moves logits here: without it the checks above could not fail."""
    moved = {
        "llama, rope llama3": {"rope_scaling": None},
        "llama, rope linear, no KV groups": {"rope_scaling": None},
        "mistral": {"windows": ()},
        "qwen2, window in the second layer": {"windows": ()},
    }
    for name, change in moved.items():
        folder, ids, expected = folders[name]
        model = open_source(str(folder)).model()
        without = replace(model, config=replace(model.config, **change))
        assert np.abs(twin.forward(without, ids) - expected).max() > 0.01 * np.abs(expected).max(), name
    for name, part in (("qwen2", "k_proj.bias"), ("qwen2", "q_proj.bias"), ("qwen3", "q_norm"), ("qwen3", "k_norm")):
        folder, ids, expected = folders[name]
        model = open_source(str(folder)).model()
        plain = {n: w[::-1] if part in n else w for n, w in model.weights.items()}
        assert np.abs(twin.forward(replace(model, weights=plain), ids) - expected).max() > 0.001, (name, part)


@pytest.mark.parametrize("name", CASES)
def test_a_config_is_read_back_as_it_was_written(folders, name):
    config = open_source(str(folders[name][0])).config()
    assert parse_config("x", json.loads(json.dumps(config_json(config))), {}) == config


@pytest.mark.parametrize("dim", [16, 64, 128])
@pytest.mark.parametrize("theta", [10000.0, 500000.0])
@pytest.mark.parametrize("kind", ["linear", "llama3"])
def test_scaled_frequencies_are_those_of_transformers(kind, theta, dim):
    rope = {"linear": LINEAR, "llama3": LLAMA3 | {"original_max_position_embeddings": 8192}}[kind]
    config = transformers.LlamaConfig(head_dim=dim, rope_parameters=rope | {"rope_theta": theta})
    theirs, attention_factor = ROPE_INIT_FUNCTIONS[kind](config, "cpu")
    fields = {name: value for name, value in rope.items() if name not in ("rope_type", "rope_theta")}
    ours = inverse_frequencies(dim, theta, RopeScaling(kind=kind, **fields))
    assert attention_factor == 1.0
    plain = inverse_frequencies(dim, theta)
    unmoved = (1.0 / theta ** (torch.arange(0, dim, 2, dtype=torch.int64).float() / dim)).numpy()
    equal = plain.view(np.int32) == unmoved.view(np.int32)  # torch's power is a last bit off now and then
    assert equal.mean() > 0.9
    assert same(ours[equal], theirs.numpy()[equal])
    assert not same(ours, plain)


def test_factors_divide_each_frequency():
    factors = tuple(float(x) for x in range(1, 9))
    scaled = inverse_frequencies(16, 1e4, RopeScaling(kind="factors", factors=factors))
    assert same(scaled, inverse_frequencies(16, 1e4) / np.arange(1, 9, dtype=np.float32))
    with pytest.raises(ValueError, match="'factors' with 2 factors for 8 frequencies"):
        inverse_frequencies(16, 1e4, RopeScaling(kind="factors", factors=(1.0, 2.0)))


def test_the_chunk_width_of_each_shape():
    """(heads / KV heads) * head_dim, halved while above 512; 256 without KV groups."""
    shapes = {(9, 3, 64): 192, (32, 8, 64): 256, (32, 8, 128): 512, (14, 2, 64): 448, (28, 4, 128): 448,
              (16, 8, 128): 256, (40, 8, 128): 320, (64, 8, 128): 512, (12, 12, 64): 256}  # fmt: skip
    for (heads, kv_heads, dim), width in shapes.items():
        assert tiny_model(heads, kv_heads, dim, layers=0, vocab=4).config.chunk_width == width


def base(family):
    sizes = {k: v for k, v in SIZES.items() if k != "initializer_range"}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "norm_topk_prob": True}
    return sizes | {"architectures": [family.architecture], "model_type": family.model_type, "rms_norm_eps": 1e-6} | (
        experts if family.experts else {}
    )  # fmt: skip


BY_TYPE = {family.model_type: family for family in FAMILIES}
WINDOWS = [
    ("mistral", {}, (4096, 4096)),
    ("mistral", {"sliding_window": None}, ()),
    ("mistral", {"sliding_window": 9}, (9, 9)),
    ("qwen2", {"sliding_window": 9}, ()),
    ("qwen2", {"sliding_window": 9, "use_sliding_window": True}, ()),
    ("qwen2", {"sliding_window": 9, "use_sliding_window": True, "max_window_layers": 0}, (9, 9)),
    ("qwen3", {"use_sliding_window": True, "layer_types": ["sliding_attention", "full_attention"]}, (4096, 0)),
    ("qwen3", {"use_sliding_window": True, "sliding_window": None, "max_window_layers": 0}, ()),
    ("qwen3_moe", {"sliding_window": 9, "use_sliding_window": True}, (9, 9)),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "change", "expected"), WINDOWS)
def test_windows_are_what_transformers_takes(kind, change, expected):
    assert parse_config("x", base(BY_TYPE[kind]) | change, {}).windows == expected


def test_experts_are_read():
    moe = base(BY_TYPE["qwen3_moe"])
    config = parse_config("x", moe | {"decoder_sparse_step": 2, "mlp_only_layers": [1]}, {})
    assert (config.num_experts, config.num_experts_per_tok, config.moe_intermediate_size) == (4, 2, 8)
    assert config.dense_layers == (0, 1)
    del moe["num_experts"]
    assert parse_config("x", moe | {"num_local_experts": 8}, {}).num_experts == 8


REFUSED = [
    ("llama", {"architectures": ["GemmaForCausalLM"]},
     r"architectures is \['GemmaForCausalLM'\]; supported: one of LlamaForCausalLM, MistralForCausalLM, Qwen2"),
    ("llama", {"architectures": None}, "architectures is None; supported: one of"),
    ("llama", {"model_type": "mistral"}, "model_type is 'mistral'; expected 'llama' of a LlamaForCausalLM"),
    ("llama", {"sliding_window": 8}, "sliding_window is 8: this engine does not know what it changes in a Llama"),
    ("llama", {"logit_scale": 0.5, "residual_multiplier": 2}, "logit_scale is 0.5: .* 1 more: residual_multiplier"),
    ("qwen3", {"attention_bias": True}, "attention_bias is True; supported: False"),
    ("qwen3", {"attention_bias": 0}, "attention_bias is 0; supported: False"),
    ("mistral", {"hidden_act": "gelu"}, "hidden_act is 'gelu'; supported: 'silu'"),
    ("mistral", {"quantization_config": {"bits": 4}}, "quantization_config is {'bits': 4}; supported: None"),
    ("mistral", {"sliding_window": 0}, "sliding_window: expected 1 or more, or null, got 0"),
    ("qwen2", {"rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope_type is 'yarn'; supported: default, linear"),
    ("qwen2", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "beta": 1}}, "unknown field 'beta'"),
    ("qwen2", {"rope_parameters": {"rope_type": "linear"}}, "factor is missing"),
    ("qwen2", {"rope_parameters": {"rope_type": "linear", "factor": -1.0}}, "factor: expected a number above 0"),
    ("qwen2", {"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor is 0.5; supported: 1.0"),
    ("qwen2", {"rope_parameters": {}, "rope_scaling": {"type": "linear", "factor": 2.0}}, "are both given"),
    ("qwen2", {"layer_types": ["sliding_attention", "full_attention"]}, "use_sliding_window is not true"),
    ("qwen2", {"use_sliding_window": True, "layer_types": ["full_attention"]}, "layer_types: expected 2 of"),
    ("qwen3_moe", {"norm_topk_prob": False}, "norm_topk_prob is False; supported: True"),
    ("qwen3_moe", {"norm_topk_prob": None}, "norm_topk_prob is missing; supported: True"),
    ("qwen3_moe", {"num_experts_per_tok": 5}, "num_experts_per_tok: expected 1 to 4, got 5"),
    ("llama", {"num_key_value_heads": 4}, "num_attention_heads 6 is no multiple of num_key_value_heads 4"),
    ("llama", {"head_dim": 7}, "head_dim: expected an even number, got 7"),
    ("llama", {"hidden_size": 0}, "hidden_size: expected 1 or more, got 0"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "change", "message"), REFUSED, ids=[f"{r[0]} {next(iter(r[1]))}" for r in REFUSED])
def test_what_is_not_computed_is_refused_by_name(kind, change, message):
    with pytest.raises(ModelError, match=message):
        parse_config("config.json", base(BY_TYPE[kind]) | change, {})


def test_an_unknown_field_that_is_null_is_none():
    parse_config("x", base(FAMILIES[0]) | {"logit_scale": None}, {})


@pytest.mark.parametrize("layout", ["padded", "packed"])
@pytest.mark.parametrize("name", [name for name, (kind, _) in CASES.items() if f"{kind}ForCausalLM" in training.KNOWN])
def test_the_trainer_is_near_transformers(folders, name, layout):
    """Beside another text, so that a mask or a position that is wrong shows."""
    folder, ids, expected = folders[name]
    forward = training.TrainingForward(open_source(str(folder)).model(), layout)
    other = training.Text(tuple(ids[::-1].tolist()) * 2, 0, 1)
    logits = list(forward.logits([other, training.Text(tuple(ids.tolist()), 0, LENGTH)]))[1]
    assert np.abs(logits - expected).max() < 2e-5 * np.abs(expected).max()
