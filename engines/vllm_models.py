"""The models that vLLM is run on here: SmolLM2, its padded twin, an 8B shape with random weights, or a folder.

It does not import vLLM. Rules: a folder appears in the cache whole or not at all; nothing is fetched; a model without
files of its own says so in its fingerprint instead of leaving fields out.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from engines import hf_folders
from engines.frozen_tokenizer import FrozenIds
from harness.engine import Field, ModelFacts, ModelInfo, Tokenizer
from harness.errors import ModelError
from harness.fingerprint.model_files import model_fields
from harness.suggest import did_you_mean

SMOLLM2 = "smollm2"
PADDED = "smollm2-padded"
DUMMY = "qwen3-8b-dummy"
NAMES = (SMOLLM2, PADDED, DUMMY)
_WEIGHTS = "model.safetensors"
DUMMY_VERSION = 1  # of the random weights; engines/vllm_dummy.py draws them
PADDED_VERSION = 1
PADDED_HEADS, PADDED_KV_HEADS = 12, 4  # the least multiple of SmolLM2's 9 and 3 that two and four ranks divide
_DUMMY_CONFIG = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 4096, "intermediate_size": 12288,
    "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    "vocab_size": 151936, "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "rope_theta": 1000000,
    "hidden_act": "silu", "tie_word_embeddings": False, "attention_bias": False, "attention_dropout": 0.0,
    "use_sliding_window": False, "sliding_window": None, "max_window_layers": 36, "torch_dtype": "bfloat16",
    "initializer_range": 0.02, "bos_token_id": 151643, "eos_token_id": 151645,
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """A folder for vLLM. `weights` "random": drawn at the start from a fixed seed; the folder then holds none."""

    name: str
    folder: Path
    weights: Literal["files", "random"]
    tokenizer: Path | None  # folder; None: the model is run on ids alone, and stop strings are refused

    def fields(self) -> tuple[Field, ...]:
        """Fingerprint fields of the model's files."""
        if self.weights == "files":
            return (*model_fields(self.folder), _field("model.source", "folder"))
        return (
            *(field for field in model_fields(self.folder) if field.name != "model.weights"),
            _field("model.weights", f"normal(0, 0.02), version {DUMMY_VERSION}"),
            _field("model.source", "random weights"),
        )


def list_models() -> tuple[ModelInfo, ...]:
    """What `samebits models --engine vllm` lists."""
    from engines.bundled.models import smollm2

    here = smollm2.gguf_path().is_file()
    return (
        ModelInfo(name=SMOLLM2, description="SmolLM2-135M-Instruct as a Hugging Face folder (9 heads, 3 KV heads)",
                  available=here, how_to_get=smollm2.FETCH),
        ModelInfo(name=PADDED, description="the same function with 12 and 4 heads, three and one of them zero: "
                  "divides into 2 or 4 ranks", available=here, how_to_get=smollm2.FETCH),
        ModelInfo(name=DUMMY, description="the shape of Qwen3-8B with random weights; corpora keep their frozen ids",
                  available=True, how_to_get="always here; needs a GPU"),
        ModelInfo(name="FOLDER", description="a Hugging Face folder that vLLM can load", available=True,
                  how_to_get="give its path"),
    )  # fmt: skip


def model_facts(model: str) -> ModelFacts:
    """Vocabulary and context, from config.json alone. Raises ModelError."""
    config = _DUMMY_CONFIG if model == DUMMY else hf_folders.read_config(_folder(model))
    try:
        vocab, context = config["vocab_size"], config["max_position_embeddings"]
    except KeyError as error:
        msg = (
            f"{_folder(model)}/config.json: expected {error.args[0]!r} at its top level; text-only models alone are run"
        )
        raise ModelError(msg) from error
    return ModelFacts(name=model, vocab_size=int(str(vocab)), max_position_embeddings=int(str(context)))


def open_tokenizer(model: str) -> Tokenizer:
    """The model's tokenizer; random weights give ids no meaning, so SmolLM2's serves there. Raises ModelError."""
    from engines.bundled.models import smollm2
    from engines.bundled.models.folder import FolderSource
    from engines.bundled_adapter import harness_errors
    from engines.bundled_tokenizer import HarnessTokenizer

    if model == DUMMY and not smollm2.gguf_path().is_file():
        return FrozenIds()
    folder = _folder(SMOLLM2 if model in NAMES else model)
    with harness_errors():
        return HarnessTokenizer(FolderSource(folder, model).tokenizer())


def open_model(model: str) -> ServedModel:
    """The folder to serve, built in the cache if need be. Raises ModelError."""
    if model == DUMMY:
        return ServedModel(name=DUMMY, folder=_build_dummy(), weights="random", tokenizer=None)
    folder = _build_padded() if model == PADDED else _folder(model)
    tokenizer = folder if (folder / "tokenizer.json").is_file() else None
    return ServedModel(name=model if model in NAMES else folder.name, folder=folder, weights="files",
                       tokenizer=tokenizer)  # fmt: skip


def _folder(model: str) -> Path:
    """The folder that holds a model's config and tokenizer. Raises ModelError."""
    if model in (SMOLLM2, PADDED):
        return hf_folders.open_folder(hf_folders.SMOLLM2)
    path = Path(model).expanduser()
    if not (path / "config.json").is_file():
        hint = did_you_mean(model, NAMES)
        raise ModelError(f"model {model!r}: expected a name or a folder with config.json, found none; {hint}")
    return path.resolve()


def _build_dummy() -> Path:
    from engines.bundled.models.cache import building, cache_folder
    from engines.bundled_adapter import harness_errors

    target = cache_folder() / "vllm" / f"{DUMMY}-v{DUMMY_VERSION}"
    with harness_errors(), building(target) as draft:
        if draft is not None:
            (draft / "config.json").write_text(json.dumps(_DUMMY_CONFIG, indent=1))
    return target


def _build_padded() -> Path:
    """SmolLM2 with zero heads added: zero rows in q, k and v, zero columns in o. The function stays the same."""
    from engines.bundled.models.cache import building, cache_folder
    from engines.bundled_adapter import harness_errors

    folder = _folder(SMOLLM2)
    target = cache_folder() / "vllm" / f"{PADDED}-{folder.name}-v{PADDED_VERSION}"
    with harness_errors(), building(target) as draft:
        if draft is not None:
            config = hf_folders.read_config(folder)
            _pad_weights(folder / _WEIGHTS, draft / _WEIGHTS, int(str(config["head_dim"])))
            for name in ("tokenizer.json", "tokenizer_config.json"):
                shutil.copyfile(folder / name, draft / name)
            heads = {"num_attention_heads": PADDED_HEADS, "num_key_value_heads": PADDED_KV_HEADS}
            (draft / "config.json").write_text(json.dumps({**config, **heads}, indent=1))
    return target


def _pad_weights(source: Path, target: Path, head_dim: int) -> None:
    """Copies a safetensors file; projections of attention get zeros up to the padded number of heads."""
    import numpy as np
    from safetensors.numpy import load_file, save_file

    rows = {"q_proj": PADDED_HEADS * head_dim, "k_proj": PADDED_KV_HEADS * head_dim,
            "v_proj": PADDED_KV_HEADS * head_dim}  # fmt: skip
    columns = {"o_proj": PADDED_HEADS * head_dim}
    tensors = load_file(source)
    for name in sorted(tensors):
        kind = name.split(".")[-2]
        if kind in rows or kind in columns:
            have = tensors[name].shape  # (rows, columns)
            more = (rows.get(kind, have[0]) - have[0], columns.get(kind, have[1]) - have[1])
            tensors[name] = np.pad(tensors[name], ((0, more[0]), (0, more[1])))
    save_file(tensors, target, metadata={"format": "pt"})
    target.chmod(0o644)  # safetensors makes it private


def _field(name: str, value: str) -> Field:
    return Field(name=name, value=value, field_class="identity", source="model")
