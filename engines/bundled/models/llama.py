"""What a Llama-family model must look like: its config.json and the names and shapes of its tensors.

It reads no files. Rules: what this engine does not compute (other architectures, rope scaling, biases) is
refused by name, never ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from engines.bundled.config import Float32, ModelConfig
from engines.bundled.errors import ModelError

ARCHITECTURE = "LlamaForCausalLM"
EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
LM_HEAD = "lm_head.weight"
IGNORED_SUFFIX = ".rotary_emb.inv_freq"  # a buffer that old checkpoints carry; computed here

Json = Mapping[str, object]
Kind = TypeVar("Kind", int, float, bool)


def parse_config(where: str, json: Json, generation: Json) -> ModelConfig:
    """The shape from config.json and generation_config.json (which wins for end-of-sequence ids).

    Raises ModelError, starting with `where`, for a missing field or an unsupported model.
    """
    _refuse_unsupported(where, json)
    hidden, heads = _need(where, json, "hidden_size", int), _need(where, json, "num_attention_heads", int)
    return ModelConfig(
        vocab_size=_need(where, json, "vocab_size", int),
        hidden_size=hidden,
        intermediate_size=_need(where, json, "intermediate_size", int),
        num_hidden_layers=_need(where, json, "num_hidden_layers", int),
        num_attention_heads=heads,
        num_key_value_heads=_value(where, json, "num_key_value_heads", int, heads),
        head_dim=_value(where, json, "head_dim", int, hidden // heads),
        max_position_embeddings=_need(where, json, "max_position_embeddings", int),
        rms_norm_eps=_need(where, json, "rms_norm_eps", float),
        rope_theta=_rope_theta(where, json),
        tie_word_embeddings=_value(where, json, "tie_word_embeddings", bool, default=False),
        bos_token_id=_value(where, json, "bos_token_id", int, 0),
        eos_token_ids=_eos_ids(where, generation.get("eos_token_id", json.get("eos_token_id"))),
    )


def config_json(config: ModelConfig) -> dict[str, object]:
    """The config.json that `parse_config` reads back."""
    return {
        "architectures": [ARCHITECTURE],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "tie_word_embeddings": config.tie_word_embeddings,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": list(config.eos_token_ids),
        "hidden_act": "silu",
    }


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name to shape of every tensor, in the order in which the model uses them."""
    hidden, inner = config.hidden_size, config.intermediate_size
    q, kv = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    layer = {
        "input_layernorm": (hidden,),
        "self_attn.q_proj": (q, hidden),
        "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, q),
        "post_attention_layernorm": (hidden,),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (config.vocab_size, hidden)}
    for index in range(config.num_hidden_layers):
        shapes |= {f"model.layers.{index}.{name}.weight": shape for name, shape in layer.items()}
    shapes[FINAL_NORM] = (hidden,)
    if not config.tie_word_embeddings:
        shapes[LM_HEAD] = (config.vocab_size, hidden)
    return shapes


def choose_weights(where: str, config: ModelConfig, tensors: Mapping[str, Float32]) -> dict[str, Float32]:
    """The tensors the model uses. Raises ModelError for missing, misshapen and unknown ones, each by name.

    A tied model's lm_head is left out, as transformers does.
    """
    shapes = tensor_shapes(config)
    faults = [f"{name} is missing" for name in shapes if name not in tensors]
    faults += [
        f"{name} has shape {tensors[name].shape}, expected {shape}"
        for name, shape in shapes.items()
        if name in tensors and tensors[name].shape != shape
    ]
    spare = {LM_HEAD} if config.tie_word_embeddings else set()
    faults += [
        f"{name} is not part of a {ARCHITECTURE} without biases"
        for name in sorted(set(tensors) - set(shapes) - spare)
        if not name.endswith(IGNORED_SUFFIX)
    ]
    if faults:
        more = f" (and {len(faults) - 5} more)" if len(faults) > 5 else ""
        msg = f"{where}: " + "; ".join(faults[:5]) + more
        raise ModelError(msg)
    return {name: tensors[name] for name in shapes}


def _refuse_unsupported(where: str, json: Json) -> None:
    architectures = json.get("architectures")
    if architectures != [ARCHITECTURE]:
        msg = f"{where}: architectures is {architectures!r}; supported: [{ARCHITECTURE!r}]"
        raise ModelError(msg)
    rope = json.get("rope_parameters")
    kind = rope.get("rope_type", "default") if isinstance(rope, Mapping) else "default"
    plain = {
        "rope_scaling": json.get("rope_scaling") is None,
        "rope_parameters": kind == "default",
        "hidden_act": json.get("hidden_act", "silu") == "silu",
        "attention_bias": not json.get("attention_bias", False),
        "mlp_bias": not json.get("mlp_bias", False),
        "quantization_config": json.get("quantization_config") is None,
        "partial_rotary_factor": json.get("partial_rotary_factor", 1.0) == 1.0,
    }
    for name in sorted(plain):
        if not plain[name]:
            msg = f"{where}: {name} is {json.get(name)!r}; this engine computes plain Llama models without it"
            raise ModelError(msg)


def _rope_theta(where: str, json: Json) -> float:
    """transformers 5 writes rope_theta into rope_parameters, earlier versions beside the other fields."""
    rope = json.get("rope_parameters")
    inner: Json = rope if isinstance(rope, Mapping) else {}
    return _value(where, inner if "rope_theta" in inner else json, "rope_theta", float, 10000.0)


def _eos_ids(where: str, value: object) -> tuple[int, ...]:
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(item) is int for item in ids):
        msg = f"{where}: eos_token_id: expected an integer or a list of integers, got {value!r}"
        raise ModelError(msg)
    return tuple(ids)


def _need(where: str, json: Json, name: str, kind: type[Kind]) -> Kind:
    if json.get(name) is None:
        msg = f"{where}: {name} is missing"
        raise ModelError(msg)
    return _value(where, json, name, kind, kind())


def _value(where: str, json: Json, name: str, kind: type[Kind], default: Kind) -> Kind:
    value = json.get(name)
    if value is None:
        return default
    if kind is float and type(value) is int:
        return kind(value)
    if type(value) is not kind:
        msg = f"{where}: {name}: expected {kind.__name__}, got {value!r}"
        raise ModelError(msg)
    return value
