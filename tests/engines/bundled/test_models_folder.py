"""Hugging Face folders: equal to transformers where supported, refused by name where not."""

import json
import os

import numpy as np
import pytest
import torch
from engine_cases import kernels, options, request, run_all
from transformers import LlamaConfig, LlamaForCausalLM

from engines.bundled.arithmetic import open_arithmetic
from engines.bundled.batch import StepBatch
from engines.bundled.engine import Engine
from engines.bundled.errors import ModelError
from engines.bundled.models.catalogue import list_models, open_source
from engines.bundled.models.config_file import config_json, parse_config
from engines.bundled.models.folder import FolderSource
from engines.bundled.models.safetensors_file import write_tensors
from engines.bundled.models.tiny import CONFIG as TINY
from engines.bundled.models.tiny import TinySource


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SAMEBITS_CACHE", str(tmp_path / "cache"))


def tiny_folder(tmp_path, config=None, weights=None, name="folder"):
    """A folder with the tiny model, or with changes of it."""
    folder = tmp_path / name
    folder.mkdir()
    weights = weights or TinySource().model().weights
    write_tensors(folder / "model.safetensors", {n: w.shape for n, w in weights.items()}, weights.items())
    (folder / "config.json").write_text(json.dumps({**config_json(TINY), **(config or {})}))
    return folder


def all_logits(model, tokens):
    """Logits (T, vocab) of every position, in one step."""
    config = options(num_pages=64, page_size=16)
    count = len(tokens)
    return open_arithmetic(model, config).forward(
        StepBatch(
            token=np.array(tokens, np.int32),
            sequence=np.zeros(count, np.int32),
            position=np.arange(count, dtype=np.int32),
            page_table=np.arange(64, dtype=np.int32)[np.newaxis],
            wanted=np.arange(count, dtype=np.int32),
        )
    )


@pytest.mark.parametrize(("tied", "dtype"), [(True, torch.float32), (False, torch.bfloat16), (False, torch.float16)])
def test_a_folder_saved_by_transformers_computes_the_same(tmp_path, tied, dtype):
    torch.manual_seed(4)
    saved = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=97, hidden_size=48, intermediate_size=80, num_hidden_layers=2, num_attention_heads=6,
            num_key_value_heads=2, head_dim=8, max_position_embeddings=64, tie_word_embeddings=tied,
            initializer_range=0.3, bos_token_id=1, eos_token_id=[2, 3],
        )
    ).to(dtype)  # fmt: skip
    saved.save_pretrained(tmp_path / "m", max_shard_size="40KB")
    source = open_source(str(tmp_path / "m"))
    assert len(source.weight_files()) > 1, "the shards are part of the test"
    assert source.config().eos_token_ids == (2, 3)
    tokens = [1, 5, 60, 96, 0, 33, 7]
    with torch.no_grad():
        again = LlamaForCausalLM.from_pretrained(tmp_path / "m", dtype=torch.float32)
        expected = again(torch.tensor([tokens])).logits[0].numpy()
    assert np.abs(all_logits(source.model(), tokens) - expected).max() < 1e-4


def test_a_folder_is_the_model_it_was_written_from(tmp_path):
    source = FolderSource(tiny_folder(tmp_path), "again")
    tiny = TinySource().model()
    model = source.model()
    assert (model.config, model.digest) == (TINY, tiny.digest)
    assert source.origin().quantisation == "F32"
    engine = Engine(TINY, options(), open_arithmetic(model, options()), kernels(), str)
    (sequence,) = run_all(engine, [request("a", [65, 66])])
    assert sequence.generated == 8


def test_the_digest_is_remembered_until_a_file_changes(tmp_path):
    folder = tiny_folder(tmp_path)
    first = FolderSource(folder, "x").model().digest
    weights = dict(TinySource().model().weights)
    weights["model.norm.weight"] = weights["model.norm.weight"] * np.float32(2)
    path = folder / "model.safetensors"
    before = path.stat()
    write_tensors(path, {n: w.shape for n, w in weights.items()}, weights.items())
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert FolderSource(folder, "x").model().digest == first, "size and time alone are looked at"
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    assert FolderSource(folder, "x").model().digest != first


def test_a_tied_models_lm_head_is_left_out(tmp_path):
    weights = TinySource().model().weights
    spare = {**weights, "lm_head.weight": weights["model.embed_tokens.weight"],
             "model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(8, np.float32)}  # fmt: skip
    assert FolderSource(tiny_folder(tmp_path, weights=spare), "x").model().digest == TinySource().model().digest


UNSUPPORTED = [
    ({"rope_parameters": {"rope_type": "yarn"}}, "rope_type is 'yarn'"),
    ({"mlp_bias": True}, "mlp_bias is True"),
    ({"hidden_size": None}, "hidden_size is missing"),
    ({"hidden_size": "64"}, "hidden_size: expected int, got '64'"),
    ({"eos_token_id": "two"}, "eos_token_id: expected an integer or a list of integers, got 'two'"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "message"), UNSUPPORTED, ids=[row[1][:20] for row in UNSUPPORTED])
def test_what_is_not_computed_is_refused_by_name(tmp_path, change, message):
    folder = tiny_folder(tmp_path, change)
    with pytest.raises(ModelError, match=message) as caught:
        FolderSource(folder, "x").config()
    assert str(folder / "config.json") in str(caught.value)


def test_rope_theta_is_read_from_either_place():
    moved = {**config_json(TINY), "rope_theta": None, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}
    assert parse_config("x", moved, {}).rope_theta == 5e5
    assert parse_config("x", {**config_json(TINY), "rope_theta": 7e5}, {}).rope_theta == 7e5


def test_the_generation_config_decides_what_ends_a_text():
    assert parse_config("x", config_json(TINY), {"eos_token_id": [4, 5]}).eos_token_ids == (4, 5)


def test_missing_misshapen_and_unknown_tensors_are_named(tmp_path):
    weights = dict(TinySource().model().weights)
    del weights["model.norm.weight"]
    weights["model.layers.0.mlp.up_proj.weight"] = np.zeros((3, 64), np.float32)
    weights["model.layers.1.self_attn.q_proj.bias"] = np.zeros(64, np.float32)
    with pytest.raises(ModelError) as caught:
        FolderSource(tiny_folder(tmp_path, weights=weights), "x").model()
    for part in ("model.norm.weight is missing", r"up_proj.weight has shape (3, 64), expected (176, 64)",
                 "q_proj.bias is not part of"):  # fmt: skip
        assert part in str(caught.value)


def test_a_folder_without_weights_config_or_tokenizer_says_what_is_missing(tmp_path):
    (tmp_path / "empty").mkdir()
    source = FolderSource(tmp_path / "empty", "x")
    with pytest.raises(ModelError, match=r"config.json: expected a readable JSON file"):
        source.config()
    with pytest.raises(ModelError, match=r"expected a \*.safetensors file there, found none"):
        source.weight_files()
    with pytest.raises(ModelError, match=r"expected a tokenizer.json there"):
        source.tokenizer()


def test_a_missing_shard_is_named(tmp_path):
    folder = tiny_folder(tmp_path)
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match=r"expected model-1.safetensors, which model.safetensors.index.json names"):
        FolderSource(folder, "x").weight_files()
    (folder / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(ModelError, match="expected an object 'weight_map'"):
        FolderSource(folder, "x").weight_files()
    (folder / "model.safetensors.index.json").write_text("[]")
    with pytest.raises(ModelError, match="expected a JSON object, got list"):
        FolderSource(folder, "x").weight_files()


def test_an_unknown_name_says_what_is_accepted(tmp_path):
    names = "'tiny', 'tiny-moe', 'smollm2', 'qwen3-8b-random', a FOLDER"
    with pytest.raises(ModelError, match=rf"model 'smolm2': expected {names} .* did you mean 'smollm2'"):
        open_source("smolm2")


def test_the_list_says_what_is_here_and_how_to_get_the_rest():
    listings = {listing.name: listing for listing in list_models()}
    assert list(listings) == ["smollm2", "tiny", "tiny-moe", "qwen3-8b-random", "tiny-vit", "FOLDER", "FILE.gguf"]
    assert listings["tiny"].available
    assert not listings["smollm2"].available  # the cache of this test is empty
    assert listings["smollm2"].how_to_get == "python -m engines.bundled.models.fetch"
