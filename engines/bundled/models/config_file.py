"""config.json to a model's shape and back. It reads no files and knows no tensors.

Rules: what this engine does not compute is refused by name, with what is supported; a field that `families` does not
list is refused too, unless it is null: ignoring it could change every logit without a word.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, TypeVar

from engines.bundled.config import ModelConfig, RopeScaling
from engines.bundled.errors import ModelError
from engines.bundled.models.families import BY_ARCHITECTURE, COMMON, HARMLESS, MUST_BE_THERE, PINNED, Family

Json = Mapping[str, object]
Kind = TypeVar("Kind", int, float, bool)

# What each kind of rope may say beside its type and theta. "samebits_factors" is written by the conversion of a GGUF.
_ROPE_FIELDS = {
    "default": frozenset[str](),
    "linear": frozenset({"factor"}),
    "llama3": frozenset({"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}),
    "samebits_factors": frozenset({"factors"}),
}
_ROPE_KINDS = "default, linear, llama3"


def parse_config(where: str, json: Json, generation: Json) -> ModelConfig:
    """The shape from config.json and generation_config.json (which wins for end-of-sequence ids).

    Raises ModelError, starting with `where`, for a missing field or an unsupported model.
    """
    family = _family(where, json)
    _refuse_unsupported(where, json, family)
    hidden, heads = _need(where, json, "hidden_size", int), _need(where, json, "num_attention_heads", int)
    layers = _need(where, json, "num_hidden_layers", int)
    rope, experts = _rope(where, json), _experts(where, json, layers) if family.experts else _Experts()
    config = ModelConfig(
        vocab_size=_need(where, json, "vocab_size", int),
        hidden_size=hidden,
        intermediate_size=_need(where, json, "intermediate_size", int),
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=_value(where, json, "num_key_value_heads", int, heads),
        head_dim=_value(where, json, "head_dim", int, family.head_dim or hidden // max(heads, 1)),
        max_position_embeddings=_need(where, json, "max_position_embeddings", int),
        rms_norm_eps=_need(where, json, "rms_norm_eps", float),
        rope_theta=_value(where, rope if "rope_theta" in rope else json, "rope_theta", float, 10000.0),
        tie_word_embeddings=_value(where, json, "tie_word_embeddings", bool, default=False),
        bos_token_id=_value(where, json, "bos_token_id", int, 0),
        eos_token_ids=_eos_ids(where, generation.get("eos_token_id", json.get("eos_token_id"))),
        architecture=family.architecture,
        qkv_bias=family.qkv_bias,
        qk_norm=family.qk_norm,
        rope_scaling=_rope_scaling(where, rope),
        windows=_windows(where, json, family, layers),
        num_experts=experts.total,
        num_experts_per_tok=experts.chosen,
        moe_intermediate_size=experts.inner,
        dense_layers=experts.dense_layers,
    )
    check_shape(where, config)
    return config


def config_json(config: ModelConfig) -> dict[str, object]:
    """The config.json that `parse_config` reads back."""
    family = BY_ARCHITECTURE[config.architecture]
    fields: dict[str, object] = {
        "architectures": [config.architecture],
        "model_type": family.model_type,
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
    if config.rope_scaling:
        fields["rope_scaling"] = _scaling_json(config.rope_scaling)
    if family.windows != "none":
        fields |= _windows_json(config, family)
    if family.experts:
        fields |= {
            "num_experts": config.num_experts,
            "num_experts_per_tok": config.num_experts_per_tok,
            "moe_intermediate_size": config.moe_intermediate_size,
            "mlp_only_layers": list(config.dense_layers),
            "norm_topk_prob": True,
        }
    return fields


def check_shape(where: str, config: ModelConfig) -> None:
    """Raises ModelError for sizes that cannot be a model, each by name."""
    sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
             "num_key_value_heads", "head_dim", "max_position_embeddings")  # fmt: skip
    for name in sizes:
        if getattr(config, name) < 1:
            raise ModelError(f"{where}: {name}: expected 1 or more, got {getattr(config, name)}")
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    if heads % kv_heads:
        raise ModelError(f"{where}: num_attention_heads {heads} is no multiple of num_key_value_heads {kv_heads}")
    if config.head_dim % 2:
        raise ModelError(f"{where}: head_dim: expected an even number, got {config.head_dim}")


def _family(where: str, json: Json) -> Family:
    names = json.get("architectures")
    name = names[0] if isinstance(names, list) and len(names) == 1 else None
    family = BY_ARCHITECTURE.get(name) if isinstance(name, str) else None
    if family is None:
        known = ", ".join(BY_ARCHITECTURE)
        raise ModelError(f"{where}: architectures is {names!r}; supported: one of {known}")
    found = json.get("model_type", family.model_type)
    if found != family.model_type:
        raise ModelError(f"{where}: model_type is {found!r}; expected {family.model_type!r} of a {name}")
    return family


def _refuse_unsupported(where: str, json: Json, family: Family) -> None:
    for name, value in PINNED.items():
        found = json.get(name)
        if found is not None and (found != value or type(found) is not type(value)):
            raise ModelError(f"{where}: {name} is {found!r}; supported: {value!r}")
    for name in MUST_BE_THERE.get(family.architecture, ()):
        if json.get(name) is None:
            raise ModelError(f"{where}: {name} is missing; supported: {PINNED[name]!r}")
    known = COMMON | family.reads | HARMLESS | PINNED.keys()
    unknown = sorted(name for name in json if name not in known and json[name] is not None)
    if unknown:
        raise ModelError(
            f"{where}: {unknown[0]} is {json[unknown[0]]!r}: this engine does not know what it changes in a "
            f"{family.architecture}; remove it if it changes no logit"
            + (f" (and {len(unknown) - 1} more: {', '.join(unknown[1:6])})" if len(unknown) > 1 else "")
        )


def _rope(where: str, json: Json) -> Json:
    """The rope fields: transformers 5 writes `rope_parameters`, earlier versions `rope_scaling`."""
    found = {name: json[name] for name in ("rope_parameters", "rope_scaling") if json.get(name) is not None}
    for name, value in found.items():
        if not isinstance(value, Mapping):
            raise ModelError(f"{where}: {name}: expected an object, got {value!r}")
    if len(found) > 1:
        raise ModelError(f"{where}: rope_parameters and rope_scaling are both given; keep one")
    value = next(iter(found.values()), {})
    return value if isinstance(value, Mapping) else {}


def _rope_scaling(where: str, rope: Json) -> RopeScaling | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    fields = _ROPE_FIELDS.get(kind) if isinstance(kind, str) else None
    if fields is None:
        raise ModelError(f"{where}: rope_type is {kind!r}; supported: {_ROPE_KINDS}")
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise ModelError(f"{where}: partial_rotary_factor is {rope['partial_rotary_factor']!r}; supported: 1.0")
    unknown = sorted(set(rope) - fields - {"rope_type", "type", "rope_theta", "partial_rotary_factor"})
    if unknown:
        raise ModelError(f"{where}: rope of type {kind}: unknown field {unknown[0]!r}; supported: {sorted(fields)}")
    if kind == "default":
        return None
    if kind == "samebits_factors":
        return RopeScaling(kind="factors", factors=_factors(where, rope.get("factors")))
    factor = _positive(where, rope, "factor")
    if kind == "linear":
        return RopeScaling(kind="linear", factor=factor)
    low, high = _positive(where, rope, "low_freq_factor"), _positive(where, rope, "high_freq_factor")
    if not low < high:
        raise ModelError(f"{where}: low_freq_factor {low} is not below high_freq_factor {high}")
    return RopeScaling(
        kind="llama3",
        factor=factor,
        low_freq_factor=low,
        high_freq_factor=high,
        original_max_position_embeddings=_need(where, rope, "original_max_position_embeddings", int),
    )


def _factors(where: str, value: object) -> tuple[float, ...]:
    if not isinstance(value, list) or not all(isinstance(item, float) and item > 0 for item in value):
        raise ModelError(f"{where}: factors: expected a list of numbers above 0, got {value!r}")
    return tuple(value)


def _scaling_json(scaling: RopeScaling) -> dict[str, object]:
    if scaling.kind == "factors":
        return {"rope_type": "samebits_factors", "factors": list(scaling.factors)}
    return {"rope_type": scaling.kind} | {name: getattr(scaling, name) for name in sorted(_ROPE_FIELDS[scaling.kind])}


def _windows(where: str, json: Json, family: Family, layers: int) -> tuple[int, ...]:
    """The window of each layer, () where no layer has one. Absent fields mean what transformers takes for them."""
    if family.windows == "none":
        return ()
    if "use_sliding_window" in family.reads and not _value(where, json, "use_sliding_window", bool, default=False):
        if "sliding_attention" in _layer_types(where, json, layers, ()):
            raise ModelError(f"{where}: layer_types names sliding_attention, but use_sliding_window is not true")
        return ()
    if "sliding_window" in json and json["sliding_window"] is None:
        return ()
    size = _value(where, json, "sliding_window", int, 4096)
    if size < 1:
        raise ModelError(f"{where}: sliding_window: expected 1 or more, or null, got {size}")
    if family.windows == "every layer":
        return (size,) * layers
    first = _value(where, json, "max_window_layers", int, 28)
    default = tuple("sliding_attention" if layer >= first else "full_attention" for layer in range(layers))
    kinds = _layer_types(where, json, layers, default)
    windows = tuple(size if kind == "sliding_attention" else 0 for kind in kinds)
    return windows if any(windows) else ()


def _layer_types(where: str, json: Json, layers: int, default: tuple[str, ...]) -> tuple[str, ...]:
    kinds = json.get("layer_types") if "layer_types" in json else None
    if kinds is None:
        return default
    known = {"full_attention", "sliding_attention"}
    if not isinstance(kinds, list) or len(kinds) != layers or not known.issuperset(kinds):
        raise ModelError(f"{where}: layer_types: expected {layers} of {', '.join(sorted(known))}, got {kinds!r}")
    return tuple(kinds)


def _windows_json(config: ModelConfig, family: Family) -> dict[str, object]:
    sizes = sorted({window for window in config.windows if window})
    fields: dict[str, object] = {"sliding_window": sizes[0] if sizes else None}
    if "use_sliding_window" in family.reads:
        fields["use_sliding_window"] = bool(sizes)
    if sizes and family.windows == "chosen layers":
        fields["layer_types"] = ["sliding_attention" if window else "full_attention" for window in config.windows]
    return fields


class _Experts(NamedTuple):
    total: int = 0
    chosen: int = 0
    inner: int = 0
    dense_layers: tuple[int, ...] = ()


def _experts(where: str, json: Json, layers: int) -> _Experts:
    name = "num_experts" if json.get("num_experts") is not None else "num_local_experts"
    experts, chosen = _need(where, json, name, int), _need(where, json, "num_experts_per_tok", int)
    if not 1 <= chosen <= experts:
        raise ModelError(f"{where}: num_experts_per_tok: expected 1 to {experts}, got {chosen}")
    step = _value(where, json, "decoder_sparse_step", int, 1)
    dense = json.get("mlp_only_layers") or []
    if step < 1 or not isinstance(dense, list) or not all(type(layer) is int for layer in dense):
        raise ModelError(f"{where}: decoder_sparse_step {step!r} or mlp_only_layers {dense!r} is none")
    others = {layer for layer in range(layers) if (layer + 1) % step}
    return _Experts(
        total=experts,
        chosen=chosen,
        inner=_need(where, json, "moe_intermediate_size", int),
        dense_layers=tuple(sorted(others | {layer for layer in dense if 0 <= layer < layers})),
    )


def _eos_ids(where: str, value: object) -> tuple[int, ...]:
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(item) is int for item in ids):
        msg = f"{where}: eos_token_id: expected an integer or a list of integers, got {value!r}"
        raise ModelError(msg)
    return tuple(ids)


def _positive(where: str, json: Json, name: str) -> float:
    value = _need(where, json, name, float)
    if not 0.0 < value < float("inf"):
        raise ModelError(f"{where}: {name}: expected a number above 0, got {value}")
    return value


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
