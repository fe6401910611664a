"""GGUF files of each family: names by gguf's own table, rows as llama.cpp's converter permutes them, read exactly."""

import gguf
import numpy as np
import pytest
import torch
import transformers
from arithmetic_cases import opened, pages_for, step
from gguf.quants import dequantize, quantize

from engines.bundled.errors import ModelError
from engines.bundled.models.catalogue import open_source
from engines.bundled.models.gguf_file import SUPPORTED_TYPES
from engines.bundled.models.tensors import EMBEDDING

SIZES = {
    "vocab_size": 300, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 64, "initializer_range": 0.3,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "norm_topk_prob": True}
# Name to (class in transformers, GGUF architecture, config beside SIZES, metadata, factors of the frequencies).
CASES = {
    "llama": ("Llama", "llama", {}, {}, None),
    "llama, linear": ("Llama", "llama", {"rope_parameters": LINEAR},
                      {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}, None),
    "llama, llama3": ("Llama", "llama", {"rope_parameters": LLAMA3}, {}, LLAMA3),
    "mistral": ("Mistral", "llama", {"sliding_window": None}, {}, None),
    "qwen2": ("Qwen2", "qwen2", {"tie_word_embeddings": True}, {}, None),
    "qwen3": ("Qwen3", "qwen3", {}, {}, None),
    "qwen3-moe": ("Qwen3Moe", "qwen3moe", EXPERTS,
                  {"expert_count": 8, "expert_used_count": 3, "expert_feed_forward_length": 32}, None),
}  # fmt: skip
TOKENS = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", "a", "b", "ab", "\u2581ab"]
TOKENS += [f"<unused{i}>" for i in range(SIZES["vocab_size"] - len(TOKENS))]
KINDS = [2, 3, 3, *[6] * 256, *[1] * (SIZES["vocab_size"] - 259)]
SCORES = [0.0] * 259 + [-float(i) for i in range(SIZES["vocab_size"] - 259)]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SAMEBITS_CACHE", str(tmp_path / "cache"))


def made(name, **changes):
    kind, _, more, _, _ = CASES[name]
    torch.manual_seed(3)
    config = getattr(transformers, f"{kind}Config")(**SIZES | more | changes)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    for tensor in model.parameters():
        if tensor.ndim == 1:
            torch.nn.init.uniform_(tensor, 0.5, 1.5)
    return model


def factors_of(rope, dim):
    """rope_freqs as llama.cpp's converter writes it (convert_hf_to_gguf.py, LlamaModel.generate_extra_tensors)."""
    old, low, high, factor = (
        rope[key] for key in ("original_max_position_embeddings", "low_freq_factor", "high_freq_factor", "factor")
    )
    out = []
    for frequency in 1.0 / rope["rope_theta"] ** (np.arange(0, dim, 2) / dim):
        wave = 2 * np.pi / frequency
        smooth = (old / wave - low) / (high - low)
        out.append(1.0 if wave < old / high else factor if wave > old / low else 1 / ((1 - smooth) / factor + smooth))
    return np.array(out, np.float32)


def stacked(state, layers):
    """Tensors with the experts of a layer as one, as GGUF has them."""
    plain = {name: tensor for name, tensor in state.items() if ".experts." not in name}
    for layer in range(layers):
        for part in ("gate_proj", "up_proj", "down_proj"):
            names = [f"model.layers.{layer}.mlp.experts.{i}.{part}.weight" for i in range(8)]
            if names[0] in state:
                plain[f"model.layers.{layer}.mlp.experts.{part}.weight"] = np.stack([state[name] for name in names])
    return plain


def write(path, name, state, kinds=None, metadata=None, raw=None):
    """A GGUF of a case. `kinds` maps parts of Hugging Face names to types, `raw` GGUF names to (bytes, type)."""
    _, architecture, _, more, rope = CASES[name]
    writer = gguf.GGUFWriter(path, architecture)
    values = {
        "block_count": 2, "context_length": 64, "embedding_length": 64, "feed_forward_length": 96,
        "attention.head_count": 4, "attention.head_count_kv": 2, "attention.key_length": 16, "rope.freq_base":
        500.0 if rope else 10000.0, "attention.layer_norm_rms_epsilon": 1e-6, "vocab_size": 300, **more,
    }  # fmt: skip
    values = {f"{architecture}.{key}": value for key, value in values.items()}
    values |= {"tokenizer.ggml.model": "llama", "tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2}
    for key, value in (values | (metadata or {})).items():
        add = {str: writer.add_string, float: writer.add_float32, int: writer.add_uint32, bool: writer.add_bool}
        add[type(value)](key, value)
    writer.add_token_list(TOKENS)
    writer.add_token_types(KINDS)
    writer.add_token_scores(SCORES)
    if rope:
        writer.add_tensor("rope_freqs.weight", factors_of(rope, 16))
    table = gguf.get_tensor_name_map(gguf.MODEL_ARCH[architecture.upper()], 2)
    for theirs, tensor in stacked(state, 2).items():
        heads = {"q_proj": 4, "k_proj": 2}.get(theirs.split(".")[-2]) if architecture == "llama" else None
        if heads:
            tensor = tensor.reshape(heads, 2, len(tensor) // heads // 2, -1).swapaxes(1, 2).reshape(tensor.shape)
        target = table.get_name(theirs, try_suffixes=(".weight", ".bias"))
        kind = next((kind for part, kind in (kinds or {}).items() if part in theirs), None)
        if raw and target in raw:
            writer.add_tensor(target, raw[target][0], raw_dtype=raw[target][1])
        elif kind is None:
            writer.add_tensor(target, np.ascontiguousarray(tensor))
        else:
            writer.add_tensor(target, quantize(np.ascontiguousarray(tensor), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def state_of(model, tmp_path):
    """Hugging Face names to float32, as transformers saves them."""
    model.save_pretrained(tmp_path / "saved")
    return dict(open_source(str(tmp_path / "saved")).model().weights)


@pytest.mark.parametrize("name", CASES)
def test_a_gguf_is_the_model_it_was_written_from(tmp_path, name):
    model = made(name)
    state = state_of(model, tmp_path)
    source = open_source(str(write(tmp_path / "x.gguf", name, state)))
    read = source.model()
    assert set(read.weights) == set(state)
    for key, tensor in state.items():
        assert read.weights[key].tobytes() == tensor.tobytes(), key
    ids = np.random.default_rng(0).integers(0, 300, 20)
    with torch.no_grad():
        expected = model(torch.tensor(ids)[None]).logits[0].numpy()
    found = opened(read).forward(step([(0, 0, ids)], pages_for()))
    assert np.abs(found - expected).max() < 2e-5 * np.abs(expected).max()


QUANTISED = ("F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1")
K_QUANTS = ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")


def test_every_supported_type_is_tested_here():
    assert {"F32", *QUANTISED, *K_QUANTS} == set(SUPPORTED_TYPES)


@pytest.mark.parametrize("kind", QUANTISED)
def test_each_quantisation_is_what_gguf_makes_of_it(tmp_path, kind):
    state = state_of(made("llama"), tmp_path)
    wanted = gguf.GGMLQuantizationType[kind]
    parts = {"embed": wanted, "q_proj": wanted, "down_proj": wanted}
    source = open_source(str(write(tmp_path / "x.gguf", "llama", state, parts)))
    assert source.origin().quantisation == "+".join(sorted({"F32", kind}))
    weights = source.model().weights
    assert weights[EMBEDDING].tobytes() == dequantize(quantize(state[EMBEDDING], wanted), wanted).tobytes()
    for key in ("model.layers.1.self_attn.q_proj.weight", "model.layers.0.mlp.down_proj.weight"):
        error = np.abs(weights[key] - state[key]).max() / np.abs(state[key]).max()
        assert 0 < error < 0.15, "rows out of order would differ by far more"


@pytest.mark.parametrize("kind", K_QUANTS)
def test_k_quants_come_out_as_gguf_dequantises_them(tmp_path, kind):
    """gguf cannot make them, so their blocks of 256 elements are made of bytes."""
    wanted = gguf.GGMLQuantizationType[kind]
    elements, size = gguf.GGML_QUANT_SIZES[wanted]
    data = np.random.default_rng(1).integers(0, 60, (64, size), np.uint8)  # small bytes: scales are finite
    state = state_of(made("llama", intermediate_size=elements), tmp_path)
    metadata, raw = {"llama.feed_forward_length": elements}, {"blk.1.ffn_down.weight": (data, wanted)}
    source = open_source(str(write(tmp_path / "x.gguf", "llama", state, metadata=metadata, raw=raw)))
    assert source.origin().quantisation == f"F32+{kind}"
    found = source.model().weights["model.layers.1.mlp.down_proj.weight"]
    expected = dequantize(data, wanted)
    assert np.isfinite(expected).all()
    assert len(np.unique(expected)) > 10
    assert found.tobytes() == expected.tobytes()


def test_too_few_experts_are_named(tmp_path):
    state = state_of(made("qwen3-moe"), tmp_path)
    path = write(tmp_path / "x.gguf", "qwen3-moe", state, metadata={"qwen3moe.expert_count": 9})
    with pytest.raises(ModelError, match=r"ffn_gate_exps.weight holds 8 experts; expected more|gate_inp.* shape"):
        open_source(str(path))


def test_a_sentencepiece_vocabulary_is_the_tokenizer_transformers_builds(tmp_path):
    from transformers import LlamaTokenizer
    from transformers.tokenization_utils_base import generate_merges

    tokenizer = open_source(str(write(tmp_path / "x.gguf", "llama", state_of(made("llama"), tmp_path)))).tokenizer()
    vocabulary = {token: i for i, token in enumerate(TOKENS)}
    merges = generate_merges(vocabulary, dict(zip(TOKENS, SCORES, strict=True)))
    theirs = LlamaTokenizer(vocab=vocabulary, merges=merges, add_bos_token=False)
    for text in ("ab a b", "abé b", "x\ny"):
        assert list(tokenizer.encode(text)) == theirs.encode(text, add_special_tokens=False), text
    # A space before the text and after a special token, as llama.cpp and Llama 2's own tokenizer.json have it.
    space = TOKENS.index("\u2581")
    assert tokenizer.encode(" ab") == (space, TOKENS.index("\u2581ab"))
    assert tokenizer.encode("</s>a") == (2, space, TOKENS.index("a"))
    assert tokenizer.encode("ab") == (TOKENS.index("\u2581ab"),)
    assert tokenizer.decode(tokenizer.encode("ab é b")) == "ab é b"
