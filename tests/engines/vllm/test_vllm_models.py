"""The models vLLM is run on: facts without loading, padded heads, random weights that say so."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from engines import vllm_models
from harness.corpus import load_corpus
from harness.corpus.retokenise import retokenise
from harness.errors import ModelError

HEAD = 4  # columns of one head in the small model here


def small_model(folder):
    """Two heads of four columns and one KV head, one layer."""
    rng = np.random.default_rng(1)
    shapes = {"q_proj": (2 * HEAD, 6), "k_proj": (HEAD, 6), "v_proj": (HEAD, 6), "o_proj": (6, 2 * HEAD)}
    tensors = {
        f"model.layers.0.self_attn.{name}.weight": rng.standard_normal(shape).astype(np.float32)
        for name, shape in shapes.items()
    }
    tensors["model.norm.weight"] = np.ones(6, np.float32)
    save_file(tensors, folder / "model.safetensors")
    return tensors


def test_padding_adds_zeros_and_changes_nothing_else(tmp_path):
    before = small_model(tmp_path)
    vllm_models._pad_weights(tmp_path / "model.safetensors", tmp_path / "padded.safetensors", HEAD)
    after = load_file(tmp_path / "padded.safetensors")
    assert set(after) == set(before)
    heads, kv_heads = vllm_models.PADDED_HEADS, vllm_models.PADDED_KV_HEADS
    wanted = {"q_proj": (heads * HEAD, 6), "k_proj": (kv_heads * HEAD, 6), "v_proj": (kv_heads * HEAD, 6),
              "o_proj": (6, heads * HEAD)}  # fmt: skip
    for name, tensor in before.items():
        rows, *columns = tensor.shape
        kept = after[name][:rows, : columns[0]] if columns else after[name][:rows]
        np.testing.assert_array_equal(kept, tensor)
        assert np.count_nonzero(after[name]) == np.count_nonzero(tensor)
        kind = name.split(".")[-2]
        assert after[name].shape == wanted.get(kind, tensor.shape)


def test_random_weights_are_named_in_the_fingerprint(tmp_path, monkeypatch):
    monkeypatch.setenv("SAMEBITS_CACHE", str(tmp_path))
    model = vllm_models.open_model(vllm_models.DUMMY)
    fields = {field.name: field.value for field in model.fields()}
    assert "normal(0, 0.02)" in fields["model.weights"]
    assert fields["model.source"] == "random weights"
    assert json.loads((model.folder / "config.json").read_text())["num_hidden_layers"] == 36
    assert len(fields) == len(model.fields())


def test_facts_come_from_the_configuration_alone(tmp_path):
    (tmp_path / "config.json").write_text('{"vocab_size": 50, "max_position_embeddings": 99}')
    facts = vllm_models.model_facts(str(tmp_path))
    assert (facts.vocab_size, facts.max_position_embeddings) == (50, 99)
    assert vllm_models.model_facts(vllm_models.DUMMY).vocab_size == 151936


@pytest.mark.parametrize(("config", "words"), [
    (None, "expected a name or a folder with config.json"),
    ("{", "expected readable JSON"),
    ("[]", "expected an object, got list"),
    ("{}", "expected 'vocab_size'"),
])  # fmt: skip
def test_what_is_no_model_is_refused_with_its_place(tmp_path, config, words):
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    with pytest.raises(ModelError, match=words) as error:
        vllm_models.model_facts(str(tmp_path))
    assert str(tmp_path) in str(error.value)


def test_a_name_that_is_nearly_right():
    with pytest.raises(ModelError, match="did you mean 'smollm2-padded'"):
        vllm_models.model_facts("smollm2-paded")


def test_the_random_model_needs_no_files_for_corpora_frozen_with_smollm2s_tokenizer(tmp_path, monkeypatch):
    monkeypatch.setenv("SAMEBITS_CACHE", str(tmp_path))
    tokenizer = vllm_models.open_tokenizer(vllm_models.DUMMY)
    for name in ("brief", "ragged", "random"):
        corpus = load_corpus(name)
        assert retokenise(corpus, tokenizer) is corpus
        assert corpus.tokenizer.vocab_size == tokenizer.vocab_size
    assert tokenizer.decode([5, 7]) == "<5><7>"
    for ask in (lambda: tokenizer.encode("text"), lambda: tokenizer.encode_chat([("user", "text")])):
        with pytest.raises(ModelError, match=r"engines\.bundled\.models\.fetch"):
            ask()
