"""GGUF files: written with gguf's own writer, read back as the weights and tokenizer they came from."""

import gguf
import numpy as np
import pytest
from gguf.quants import dequantize, quantize
from tokenizers.pre_tokenizers import ByteLevel

from engines.bundled.errors import ModelError
from engines.bundled.models.catalogue import open_source
from engines.bundled.models.convert import NOTE, check_conversion, open_gguf
from engines.bundled.models.gguf_file import GgufFile, _gguf_name
from engines.bundled.models.tiny import CONFIG, TinySource

LETTERS = sorted(ByteLevel.alphabet())
MERGES = ["h e", "l l", "he ll", "hell o", "4 2"]
TOKENS = [*LETTERS, "he", "ll", "hell", "hello", "42", "<|im_start|>", "<|im_end|>"]
TOKENS += [f"<unused{i}>" for i in range(CONFIG.vocab_size - len(TOKENS))]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['role'] }}:{{ m['content'] }}<|im_end|>{% endfor %}<|im_start|>"
Q8_0, F16 = gguf.GGMLQuantizationType.Q8_0, gguf.GGMLQuantizationType.F16


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SAMEBITS_CACHE", str(tmp_path / "cache"))


def permute(tensor, heads):
    """What llama.cpp's converter does to query and key rows."""
    return tensor.reshape(heads, 2, tensor.shape[0] // heads // 2, -1).swapaxes(1, 2).reshape(tensor.shape)


def stored(name, tensor):
    """The tensor as a converter would store it."""
    if "q_proj" in name:
        return permute(tensor, CONFIG.num_attention_heads)
    if "k_proj" in name:
        return permute(tensor, CONFIG.num_key_value_heads)
    return tensor


def write(path, metadata=None, kinds=None, extra=(), merges=MERGES):
    """A GGUF of the tiny model. `metadata` replaces or (None) removes keys; `kinds` maps name parts to types."""
    writer = gguf.GGUFWriter(path, "llama")
    values = {
        "llama.block_count": 2, "llama.context_length": 2048, "llama.embedding_length": 64,
        "llama.feed_forward_length": 176, "llama.attention.head_count": 4, "llama.attention.head_count_kv": 2,
        "llama.rope.freq_base": 10000.0, "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "smollm", "tokenizer.chat_template": TEMPLATE,
        "tokenizer.ggml.bos_token_id": 261, "tokenizer.ggml.eos_token_id": 262, **(metadata or {}),
    }  # fmt: skip
    for key, value in values.items():
        if isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif value is not None:
            writer.add_uint32(key, value)
    writer.add_token_list(TOKENS)
    writer.add_token_types([3 if token.startswith("<|") else 1 for token in TOKENS])
    writer.add_token_merges(merges)
    for name, tensor in [*TinySource().model().weights.items(), *extra]:
        add(writer, name, stored(name, tensor), kinds or {})
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add(writer, name, tensor, kinds):
    target = _gguf_name(name)[0] if name.startswith(("model.", "lm_head")) else name
    kind = next((kind for part, kind in kinds.items() if part in name), None)
    if kind is None:
        writer.add_tensor(target, np.ascontiguousarray(tensor))
    else:
        writer.add_tensor(target, quantize(np.ascontiguousarray(tensor), kind), raw_dtype=kind)


def test_float32_comes_back_bit_for_bit_and_rows_in_hugging_face_order(tmp_path):
    source = open_source(str(write(tmp_path / "tiny.gguf")))
    model = source.model()
    for name, tensor in TinySource().model().weights.items():
        assert model.weights[name].tobytes() == tensor.tobytes(), name
    assert model.name == "tiny"
    assert source.origin() == type(source.origin())(kind="gguf", quantisation="F32")


def test_the_shape_comes_from_the_metadata(tmp_path):
    config = open_source(str(write(tmp_path / "tiny.gguf"))).config()
    assert (config.max_position_embeddings, config.rms_norm_eps, config.eos_token_ids) == (2048, 1e-5, (262,))
    assert (config.num_key_value_heads, config.head_dim, config.vocab_size) == (2, 16, 512)
    assert config.tie_word_embeddings


def test_an_untied_head_is_found(tmp_path):
    head = np.arange(512 * 64, dtype=np.float32).reshape(512, 64)
    source = open_source(str(write(tmp_path / "x.gguf", extra=[("lm_head.weight", head)])))
    assert not source.config().tie_word_embeddings
    assert source.model().weights["lm_head.weight"].tobytes() == head.tobytes()


def test_quantised_tensors_are_what_gguf_makes_of_them(tmp_path):
    path = write(tmp_path / "x.gguf", kinds={"q_proj": Q8_0, "embed": Q8_0, "down_proj": F16})
    source = open_source(str(path))
    weights, tiny = source.model().weights, TinySource().model().weights
    assert source.origin().quantisation == "F16+F32+Q8_0"
    name = "model.embed_tokens.weight"
    expected = dequantize(quantize(tiny[name], Q8_0), Q8_0)
    assert weights[name].tobytes() == expected.tobytes()
    assert weights[name].tobytes() != tiny[name].tobytes()
    name = "model.layers.1.mlp.down_proj.weight"
    assert weights[name].tobytes() == tiny[name].astype(np.float16).astype(np.float32).tobytes()
    name = "model.layers.0.self_attn.q_proj.weight"
    assert np.abs(weights[name] - tiny[name]).max() < 0.005, "rows out of order would differ by far more"


def test_conversion_happens_once_and_is_found_by_content(tmp_path, monkeypatch):
    first = open_gguf(write(tmp_path / "a.gguf"), "a")
    monkeypatch.setattr("engines.bundled.models.convert.GgufFile", None)  # a second conversion would fail
    (tmp_path / "b.gguf").write_bytes((tmp_path / "a.gguf").read_bytes())
    assert open_gguf(tmp_path / "b.gguf", "b").folder == first.folder
    assert not list(first.folder.parent.glob("*.part"))


def test_a_failed_conversion_leaves_nothing_behind(tmp_path):
    path = write(tmp_path / "a.gguf", {"tokenizer.ggml.pre": "falcon"})
    with pytest.raises(ModelError):
        open_gguf(path, "a")
    assert [entry.suffix for entry in (tmp_path / "cache" / "converted").iterdir()] == [".lock"]


def test_a_full_check_finds_a_flipped_bit_and_a_quick_one_a_missing_byte(tmp_path):
    source = open_gguf(write(tmp_path / "a.gguf"), "a")
    check_conversion(source)
    weights = source.folder / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-3] ^= 1
    weights.write_bytes(data)
    with pytest.raises(ModelError, match="expected weights with digest"):
        check_conversion(source)
    weights.write_bytes(data[:-1])
    with pytest.raises(ModelError, match=rf"expected {len(data)} bytes, found {len(data) - 1}; delete the folder"):
        source.model()
    assert (source.folder / NOTE).is_file()


def test_the_tokenizer_merges_splits_digits_and_knows_its_specials(tmp_path):
    tokenizer = open_source(str(write(tmp_path / "x.gguf"))).tokenizer()
    assert tokenizer.encode("hello") == (TOKENS.index("hello"),)
    assert tokenizer.encode("<|im_end|>") == (262,)
    assert tokenizer.encode("42") == (TOKENS.index("4"), TOKENS.index("2"))
    assert tokenizer.decode(tokenizer.encode("hello wörld 42")) == "hello wörld 42"
    assert tokenizer.encode_chat([("user", "hello")])[0] == 261
    assert (
        tokenizer.decode(tokenizer.encode_chat([("user", "hello")])) == "<|im_start|>user:hello<|im_end|><|im_start|>"
    )


@pytest.mark.parametrize(
    ("kind", "pieces"),
    [
        ("smollm", ["hell", "o", "4", "2"]),
        ("gpt-2", ["hell", "o", "42"]),
        ("llama-bpe", ["hello", "42"]),
        ("qwen2", ["hell", "o", "4", "2"]),
    ],
)
def test_every_pre_tokenizer_splits_in_its_own_way(tmp_path, kind, pieces):
    """Without the merge to "hello", llama-bpe alone takes the whole word, for the vocabulary holds it."""
    path = write(tmp_path / "x.gguf", {"tokenizer.ggml.pre": kind}, merges=[*MERGES[:-2], MERGES[-1]])
    assert open_source(str(path)).tokenizer().encode("hello42") == tuple(TOKENS.index(piece) for piece in pieces)


REFUSED = [
    ({"llama.rope.scaling.type": "yarn"}, "llama.rope.scaling.type is 'yarn'; supported: 'none', 'linear'"),
    ({"tokenizer.ggml.model": "t5"}, r"tokenizer.ggml.model is 't5'; supported: 'gpt2' .*, 'llama' \(SentencePiece"),
    ({"tokenizer.ggml.pre": "falcon"}, "tokenizer.ggml.pre is 'falcon'; supported: gpt-2, llama-bpe, qwen2, smollm"),
    ({"tokenizer.ggml.pre": None}, "tokenizer.ggml.pre is 'default'"),
    ({"llama.rope.scale_linear": 0.0}, "rope scaling: expected a factor above 0, got 0.0"),
    ({"llama.rope.scaling.type": "linear"}, "metadata llama.rope.scaling.factor is missing"),
    ({"llama.attention.sliding_window": 8}, "llama.attention.sliding_window is 8: this engine does not know"),
    ({"llama.expert_count": 8}, "llama.expert_count is 8; supported: 0"),
    ({"llama.attention.value_length": 8}, "llama.attention.value_length is 8; supported: the head size, 16"),
    ({"llama.attention.head_count_kv": 3}, "num_attention_heads 4 is no multiple of num_key_value_heads 3"),
    ({"llama.rope.dimension_count": 8}, "llama.rope.dimension_count is 8; supported: the head size, 16"),
    ({"llama.block_count": None}, "metadata llama.block_count is missing"),
    ({"tokenizer.ggml.eos_token_id": None}, "metadata tokenizer.ggml.eos_token_id is missing"),
]


@pytest.mark.parametrize(("metadata", "message"), REFUSED, ids=[row[1][:30] for row in REFUSED])
def test_what_is_not_supported_is_refused_by_name(tmp_path, metadata, message):
    with pytest.raises(ModelError, match=message):
        open_gguf(write(tmp_path / "x.gguf", metadata), "x")


@pytest.mark.parametrize("merge", ["h x", "he", "4 2 0"])
def test_a_merge_of_tokens_that_are_not_there_is_named(tmp_path, merge):
    with pytest.raises(ModelError, match=rf"x.gguf: tokenizer.ggml.merges\[5\] is '{merge}': expected two tokens that"):
        open_gguf(write(tmp_path / "x.gguf", merges=[*MERGES, merge]), "x")


def test_a_token_without_a_type_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(
        gguf.GGUFWriter, "add_token_types", lambda self, kinds: self.add_array("tokenizer.ggml.token_type", kinds[1:])
    )
    with pytest.raises(ModelError, match=r"tokenizer.ggml.token_type: expected one for each of 512 tokens, found 511"):
        open_gguf(write(tmp_path / "x.gguf"), "x")


def test_extra_and_missing_tensors_are_named(tmp_path):
    extra = [("blk.0.attn_q.bias", np.ones(64, np.float32))]
    with pytest.raises(ModelError, match=r"tensors is .'blk.0.attn_q.bias'.; supported: those of a LlamaForCausalLM"):
        GgufFile(write(tmp_path / "x.gguf", extra=extra))
    with pytest.raises(ModelError, match=r"tensor blk.2.attn_norm.weight is missing"):
        open_gguf(write(tmp_path / "y.gguf", {"llama.block_count": 3}), "y")
    with pytest.raises(ModelError, match=r"blk.0.ffn_gate.weight has shape \(176, 64\), expected \(100, 64\)"):
        open_gguf(write(tmp_path / "z.gguf", {"llama.feed_forward_length": 100}), "z")


def test_other_tensor_types_are_refused_by_name(tmp_path):
    path = write(tmp_path / "x.gguf", extra=[], kinds={"o_proj": gguf.GGMLQuantizationType.Q8_0})
    file = GgufFile(path)
    file._tensors["blk.0.attn_output.weight"] = file._tensors["blk.0.attn_output.weight"]._replace(
        tensor_type=gguf.GGMLQuantizationType.IQ2_XS
    )
    with pytest.raises(ModelError, match=r"tensor types is \['IQ2_XS'\]; supported: F32, F16, BF16, Q8_0, Q4_0, Q4_1"):
        file._refuse_unsupported()


def test_other_architectures_are_refused(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "gemma3")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(
        ModelError, match=r"general.architecture is 'gemma3'; supported: 'llama', 'qwen2', 'qwen3', 'qw"
    ):
        GgufFile(tmp_path / "x.gguf")


@pytest.mark.parametrize("content", [b"", b"not a model", b"GGUF\x03\x00\x00\x00"])
def test_what_is_no_gguf_is_an_error(tmp_path, content):
    path = tmp_path / "x.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelError, match="expected a readable GGUF file"):
        open_gguf(path, "x")
    with pytest.raises(ModelError, match="expected a GGUF file there, found none"):
        open_gguf(tmp_path / "none.gguf", "x")
