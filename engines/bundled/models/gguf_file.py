"""Reads a Llama-family GGUF file: shape, weights as float32 under Hugging Face names, tokenizer.

It does not know caches. Source: llama.cpp's convert_hf_to_gguf.py, whose permutation of query and key rows is
undone here. Rules: tensor types come out through gguf's own dequantisation; unknown architectures,
tokenizers, scalings and tensor types are refused by name.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from engines.bundled.config import Float32, ModelConfig
from engines.bundled.errors import ModelError
from engines.bundled.models.llama import EMBEDDING, FINAL_NORM, LM_HEAD, tensor_shapes

if TYPE_CHECKING:
    from gguf import GGUFReader

_LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_OUTER_NAMES = {EMBEDDING: "token_embd.weight", FINAL_NORM: "output_norm.weight", LM_HEAD: "output.weight"}


class GgufFile:
    """An open GGUF file. Opening parses all metadata, which takes seconds for a large vocabulary."""

    def __init__(self, path: Path) -> None:
        """Raises ModelError if the file is missing, no GGUF, or no plain Llama."""
        self.path = path
        self._reader = _open(path)
        self._tensors = {tensor.name: tensor for tensor in self._reader.tensors}
        self._refuse_unsupported()

    def config(self) -> ModelConfig:
        """The shape. Raises ModelError for a missing field."""
        heads, hidden = self._int("llama.attention.head_count"), self._int("llama.embedding_length")
        return ModelConfig(
            vocab_size=len(self.need("tokenizer.ggml.tokens")),
            hidden_size=hidden,
            intermediate_size=self._int("llama.feed_forward_length"),
            num_hidden_layers=self._int("llama.block_count"),
            num_attention_heads=heads,
            num_key_value_heads=int(self.get("llama.attention.head_count_kv", heads)),
            head_dim=int(self.get("llama.attention.key_length", hidden // heads)),
            max_position_embeddings=self._int("llama.context_length"),
            rms_norm_eps=_shortest(float(self.need("llama.attention.layer_norm_rms_epsilon"))),
            rope_theta=_shortest(float(self.get("llama.rope.freq_base", 10000.0))),
            tie_word_embeddings=_OUTER_NAMES[LM_HEAD] not in self._tensors,
            bos_token_id=int(self.get("tokenizer.ggml.bos_token_id", 0)),
            eos_token_ids=(self._int("tokenizer.ggml.eos_token_id"),),
        )

    def weights(self) -> Iterator[tuple[str, Float32]]:
        """Name and tensor one by one, in the order of `tensor_shapes`. Raises ModelError."""
        config = self.config()
        for name, shape in tensor_shapes(config).items():
            tensor = self._dequantise(_gguf_name(name))
            if tensor.shape != shape:
                msg = f"{self.path}: {_gguf_name(name)} has shape {tensor.shape}, expected {shape}"
                raise ModelError(msg)
            yield name, np.ascontiguousarray(_unpermute(name, tensor, config))

    def quantisation(self) -> str:
        """The tensor types the file holds, for example "F32+Q4_1+Q8_0"."""
        return "+".join(sorted({tensor.tensor_type.name for tensor in self._tensors.values()}))

    def get(self, key: str, default: Any = None) -> Any:  # noqa: ANN401 - GGUF values are of many types
        """A metadata value, or `default`."""
        field = self._reader.fields.get(key)
        return default if field is None else field.contents()

    def need(self, key: str) -> Any:  # noqa: ANN401 - GGUF values are of many types
        """A metadata value. Raises ModelError if it is missing."""
        value = self.get(key)
        if value is None:
            msg = f"{self.path}: metadata {key} is missing"
            raise ModelError(msg)
        return value

    def _int(self, key: str) -> int:
        return int(self.need(key))

    def _dequantise(self, name: str) -> Float32:
        from gguf.quants import dequantize

        tensor = self._tensors.get(name)
        if tensor is None:
            msg = f"{self.path}: tensor {name} is missing"
            raise ModelError(msg)
        try:
            return np.asarray(dequantize(tensor.data, tensor.tensor_type), np.float32)
        except NotImplementedError as error:
            kind = tensor.tensor_type.name
            raise ModelError(f"{self.path}: tensor {name} is {kind}, which gguf cannot dequantise") from error

    def _refuse_unsupported(self) -> None:
        architecture = self.get("general.architecture")
        scaling = self.get("llama.rope.scaling.type", "none")
        linear = self.get("llama.rope.scale_linear", 1.0)  # the older key
        rotated = self.get("llama.rope.dimension_count")
        if architecture != "llama":
            raise ModelError(f"{self.path}: general.architecture is {architecture!r}; supported: 'llama'")
        config = self.config()
        head_dim = config.head_dim
        spare = sorted(set(self._tensors) - {_gguf_name(name) for name in tensor_shapes(config)})
        plain = (
            (scaling == "none", "llama.rope.scaling.type", scaling, "'none'"),
            (linear == 1, "llama.rope.scale_linear", linear, "1.0"),
            (rotated in (None, head_dim), "llama.rope.dimension_count", rotated, f"the head size, {head_dim}"),
            (not spare, "tensors", spare[:3], "those of a plain Llama"),
        )
        for good, what, found, expected_words in plain:
            if not good:
                msg = f"{self.path}: {what} is {found!r}; supported: {expected_words}"
                raise ModelError(msg)


def _open(path: Path) -> GGUFReader:
    from gguf import GGUFReader

    try:
        return GGUFReader(path)
    except (OSError, ValueError, IndexError, KeyError) as error:
        msg = f"{path}: expected a readable GGUF file ({error})"
        raise ModelError(msg) from error


def _gguf_name(name: str) -> str:
    """GGUF's name of a tensor, from its Hugging Face name."""
    if name in _OUTER_NAMES:
        return _OUTER_NAMES[name]
    index, _, part = name.removeprefix("model.layers.").partition(".")
    return f"blk.{index}.{_LAYER_NAMES[part.removesuffix('.weight')]}.weight"


def _unpermute(name: str, tensor: Float32, config: ModelConfig) -> Float32:
    """Undoes llama.cpp's reordering of query and key rows: it interleaves the two halves that rope pairs."""
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(name.split(".")[-2])
    if heads is None:
        return tensor
    rows, columns = tensor.shape
    return tensor.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def _shortest(value: float) -> float:
    """The shortest decimal with the same float32: GGUF stores 1e-5 as 9.99999974e-06."""
    return (
        float(np.format_float_positional(np.float32(value), unique=True, trim="-")) if math.isfinite(value) else value
    )
