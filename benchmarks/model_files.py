"""Writes one model for other engines: a Hugging Face folder and a GGUF file, both in float32 with the same values.

Rules: files are made once per model digest; the GGUF keeps every key of the file it comes from.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter, dequantize
from safetensors.numpy import save_file

from engines.bundled.config import Model, ModelConfig
from engines.bundled.models import smollm2

_OWN_KEYS = ("general.architecture", "general.file_type", "GGUF.version", "GGUF.tensor_count", "GGUF.kv_count")


def write_folder(model: Model, cache: Path) -> Path:
    """A folder that transformers and vLLM load: config.json and model.safetensors. No tokenizer: prompts are ids."""
    folder = cache / f"{model.name}-{model.digest[:12]}-float32"
    if not (folder / "config.json").is_file():
        folder.mkdir(parents=True, exist_ok=True)
        save_file({name: np.ascontiguousarray(weight) for name, weight in model.weights.items()},
                  folder / "model.safetensors", metadata={"format": "pt"})  # fmt: skip
        (folder / "config.json").write_text(json.dumps(_config(model.config), indent=1))
    return folder


def write_gguf(name: str, cache: Path) -> Path | None:
    """The model's GGUF with every tensor in float32; None for a model that has no GGUF file."""
    source = Path(name) if name.endswith(".gguf") else smollm2.gguf_path() if name == smollm2.NAME else None
    if source is None:
        return None
    target = cache / f"{source.stem}-float32.gguf"
    if not target.is_file():
        cache.mkdir(parents=True, exist_ok=True)
        _convert(source, target)
    return target


def _convert(source: Path, target: Path) -> None:
    reader = GGUFReader(source)
    partial = target.with_suffix(".part")
    writer = GGUFWriter(partial, str(reader.fields["general.architecture"].contents()))
    for field in reader.fields.values():
        if field.name not in _OWN_KEYS:
            inner = field.types[-1] if len(field.types) > 1 else None
            writer.add_key_value(field.name, field.contents(), field.types[0], inner)
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type)
        shape = [int(size) for size in reversed(tensor.shape)]
        writer.add_tensor(tensor.name, np.ascontiguousarray(values, np.float32).reshape(shape),
                          raw_dtype=GGMLQuantizationType.F32)  # fmt: skip
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    partial.rename(target)


def _config(shape: ModelConfig) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_hidden_layers,
        "num_attention_heads": shape.num_attention_heads,
        "num_key_value_heads": shape.num_key_value_heads,
        "head_dim": shape.head_dim,
        "max_position_embeddings": shape.max_position_embeddings,
        "rms_norm_eps": shape.rms_norm_eps,
        "rope_theta": shape.rope_theta,
        "tie_word_embeddings": shape.tie_word_embeddings,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": shape.bos_token_id,
        "eos_token_id": list(shape.eos_token_ids),
        "torch_dtype": "float32",
    }
