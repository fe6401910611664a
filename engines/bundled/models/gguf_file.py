"""Reads a GGUF file of a family this engine computes: shape, weights as float32 under Hugging Face names.

It does not know caches or tokenizers. Source: llama.cpp's convert_hf_to_gguf.py, whose permutation of query and key
rows (of llama alone) is undone here. Rules: tensor types come out through gguf's own dequantisation; unknown
architectures, metadata of the architecture, scalings, tensors and tensor types are refused by name.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from engines.bundled.config import Float32, ModelConfig, RopeScaling
from engines.bundled.errors import ModelError
from engines.bundled.models.config_file import check_shape
from engines.bundled.models.families import BY_GGUF, Family
from engines.bundled.models.tensors import EMBEDDING, FINAL_NORM, LM_HEAD, tensor_shapes

if TYPE_CHECKING:
    from gguf import GGUFReader

_LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.experts.gate_proj": "ffn_gate_exps",
    "mlp.experts.up_proj": "ffn_up_exps",
    "mlp.experts.down_proj": "ffn_down_exps",
}
_OUTER_NAMES = {EMBEDDING: "token_embd.weight", FINAL_NORM: "output_norm.weight", LM_HEAD: "output.weight"}
_FACTORS = "rope_freqs.weight"  # how llama.cpp's converter stores the llama3 scaling
SUPPORTED_TYPES = (
    "F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K",
)  # fmt: skip
# Metadata below "<architecture>." that is read here, and that says nothing about the arithmetic.
_READ = frozenset(
    {"attention.head_count", "attention.head_count_kv", "attention.key_length", "attention.value_length",
     "attention.layer_norm_rms_epsilon", "block_count", "context_length", "embedding_length", "feed_forward_length",
     "rope.dimension_count", "rope.freq_base", "rope.scale_linear", "rope.scaling.factor", "rope.scaling.type",
     "expert_count", "expert_used_count", "expert_feed_forward_length"}
)  # fmt: skip
_HARMLESS = frozenset({"vocab_size", "rope.scaling.original_context_length", "rope.scaling.finetuned"})


class GgufFile:
    """An open GGUF file. Opening parses all metadata, which takes seconds for a large vocabulary."""

    def __init__(self, path: Path) -> None:
        """Raises ModelError if the file is missing, no GGUF, or not of a family that is computed."""
        self.path = path
        self._reader = _open(path)
        self._tensors = {tensor.name: tensor for tensor in self._reader.tensors}
        self.family = self._find_family()
        self._refuse_unsupported()

    def config(self) -> ModelConfig:
        """The shape. Raises ModelError for a missing field."""
        heads, hidden = self._int("attention.head_count"), self._int("embedding_length")
        family = self.family
        config = ModelConfig(
            vocab_size=len(self.need("tokenizer.ggml.tokens")),
            hidden_size=hidden,
            intermediate_size=self._int("feed_forward_length"),
            num_hidden_layers=self._int("block_count"),
            num_attention_heads=heads,
            num_key_value_heads=self._int("attention.head_count_kv", heads),
            head_dim=self._int("attention.key_length", hidden // max(heads, 1)),
            max_position_embeddings=self._int("context_length"),
            rms_norm_eps=self._float("attention.layer_norm_rms_epsilon"),
            rope_theta=self._float("rope.freq_base", 10000.0),
            tie_word_embeddings=_OUTER_NAMES[LM_HEAD] not in self._tensors,
            bos_token_id=int(self.get("tokenizer.ggml.bos_token_id", 0)),
            eos_token_ids=(int(self.need("tokenizer.ggml.eos_token_id")),),
            architecture=family.architecture,
            qkv_bias=family.qkv_bias,
            qk_norm=family.qk_norm,
            rope_scaling=self._rope_scaling(),
            num_experts=self._int("expert_count") if family.experts else 0,
            num_experts_per_tok=self._int("expert_used_count") if family.experts else 0,
            moe_intermediate_size=self._int("expert_feed_forward_length") if family.experts else 0,
        )
        check_shape(str(self.path), config)
        return config

    def weights(self) -> Iterator[tuple[str, Float32]]:
        """Name and tensor one by one, in the order of `tensor_shapes`. Raises ModelError."""
        config = self.config()
        for name, shape in tensor_shapes(config).items():
            tensor = self._dequantise(*_gguf_name(name))
            if tensor.shape != shape:
                msg = f"{self.path}: {_gguf_name(name)[0]} has shape {tensor.shape}, expected {shape}"
                raise ModelError(msg)
            if self.family.permuted:
                tensor = _unpermute(name, tensor, config)
            yield name, np.ascontiguousarray(tensor)

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

    def _key(self, name: str) -> str:
        return f"{self.family.gguf}.{name}"

    def _int(self, name: str, default: int | None = None) -> int:
        value = self.need(self._key(name)) if default is None else self.get(self._key(name), default)
        if not isinstance(value, int | np.integer):
            raise ModelError(f"{self.path}: {self._key(name)}: expected one integer, got {value!r}")
        return int(value)

    def _float(self, name: str, default: float | None = None) -> float:
        return _shortest(float(self.need(self._key(name)) if default is None else self.get(self._key(name), default)))

    def _rope_scaling(self) -> RopeScaling | None:
        kind, factor = self.get(self._key("rope.scaling.type"), "none"), self._linear_factor()
        tensor = self._tensors.get(_FACTORS)
        if tensor is not None and factor is None:
            return RopeScaling(kind="factors", factors=tuple(map(float, np.ravel(self._dequantise(_FACTORS, None)))))
        if kind not in ("none", "linear") or tensor is not None:
            found = f"{kind!r}{' with ' + _FACTORS if tensor is not None else ''}"
            msg = (
                f"{self.path}: {self._key('rope.scaling.type')} is {found}; supported: 'none', 'linear', or {_FACTORS}"
            )
            raise ModelError(msg)
        return None if factor is None else RopeScaling(kind="linear", factor=factor)

    def _linear_factor(self) -> float | None:
        """By how much positions are compressed, by the newer or the older key; None: not at all."""
        linear = self.get(self._key("rope.scaling.type"), "none") == "linear"
        factor = self._float("rope.scaling.factor") if linear else self._float("rope.scale_linear", 1.0)
        if not 0.0 < factor < math.inf:
            raise ModelError(f"{self.path}: rope scaling: expected a factor above 0, got {factor}")
        return None if factor == 1.0 else factor

    def _dequantise(self, name: str, expert: int | None) -> Float32:
        from gguf.quants import dequantize

        tensor = self._tensors.get(name)
        if tensor is None:
            msg = f"{self.path}: tensor {name} is missing"
            raise ModelError(msg)
        if expert is not None and expert >= len(tensor.data):
            raise ModelError(f"{self.path}: tensor {name} holds {len(tensor.data)} experts; expected more")
        data = tensor.data if expert is None else tensor.data[expert]
        return np.asarray(dequantize(data, tensor.tensor_type), np.float32)

    def _find_family(self) -> Family:
        architecture = self.get("general.architecture")
        family = BY_GGUF.get(architecture) if isinstance(architecture, str) else None
        if family is None:
            known = ", ".join(map(repr, BY_GGUF))
            raise ModelError(f"{self.path}: general.architecture is {architecture!r}; supported: {known}")
        return family

    def _refuse_unsupported(self) -> None:
        prefix = f"{self.family.gguf}."
        named = {key.removeprefix(prefix) for key in self._reader.fields if key.startswith(prefix)}
        for name in sorted(named - _READ - _HARMLESS):
            value = self.get(prefix + name)
            raise ModelError(f"{self.path}: {prefix}{name} is {value!r}: this engine does not know what it changes")
        config = self.config()
        dim = config.head_dim
        rotated, value_size = self.get(prefix + "rope.dimension_count"), self.get(prefix + "attention.value_length")
        used = {_gguf_name(name)[0] for name in tensor_shapes(config)} | {_FACTORS}
        spare = sorted(set(self._tensors) - used)
        kinds = {tensor.tensor_type.name for tensor in self._tensors.values()} - set(SUPPORTED_TYPES)
        experts = 0 if self.family.experts else self.get(prefix + "expert_count", 0)
        plain = (
            (rotated in (None, dim), prefix + "rope.dimension_count", rotated, f"the head size, {dim}"),
            (value_size in (None, dim), prefix + "attention.value_length", value_size, f"the head size, {dim}"),
            (experts == 0, prefix + "expert_count", experts, "0"),
            (not spare, "tensors", spare[:3], f"those of a {config.architecture}"),
            (not kinds, "tensor types", sorted(kinds), ", ".join(SUPPORTED_TYPES)),
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


def _gguf_name(name: str) -> tuple[str, int | None]:
    """GGUF's name of a tensor, from its Hugging Face name, and which of the experts it stacks, if it does."""
    if name in _OUTER_NAMES:
        return _OUTER_NAMES[name], None
    index, _, part = name.removeprefix("model.layers.").partition(".")
    part, _, ending = part.rpartition(".")
    expert = None
    if part.startswith("mlp.experts."):
        number, _, matrix = part.removeprefix("mlp.experts.").partition(".")
        expert, part = int(number), f"mlp.experts.{matrix}"
    return f"blk.{index}.{_LAYER_NAMES[part]}.{ending}", expert


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
