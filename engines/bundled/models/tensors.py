"""Names and shapes of the tensors a model of some shape has, under Hugging Face names. It reads no files.

Rules: what a shape does not have (biases, head norms, experts) is not listed, and so refused where it is found.
"""

from __future__ import annotations

from collections.abc import Mapping

from engines.bundled.config import ModelConfig
from engines.bundled.errors import ModelError

EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
LM_HEAD = "lm_head.weight"
IGNORED_SUFFIX = ".rotary_emb.inv_freq"  # a buffer that old checkpoints carry; computed here

Shapes = dict[str, tuple[int, ...]]


def tensor_shapes(config: ModelConfig) -> Shapes:
    """Name to shape of every tensor, in the order in which the model uses them."""
    shapes: Shapes = {EMBEDDING: (config.vocab_size, config.hidden_size)}
    for index in range(config.num_hidden_layers):
        layer = _attention_shapes(config) | _mlp_shapes(config, index)
        shapes |= {f"model.layers.{index}.{name}": shape for name, shape in layer.items()}
    shapes[FINAL_NORM] = (config.hidden_size,)
    if not config.tie_word_embeddings:
        shapes[LM_HEAD] = (config.vocab_size, config.hidden_size)
    return shapes


def _attention_shapes(config: ModelConfig) -> Shapes:
    hidden, dim = config.hidden_size, config.head_dim
    sizes = {"q": config.num_attention_heads * dim, "k": config.num_key_value_heads * dim}
    sizes["v"] = sizes["k"]
    shapes: Shapes = {"input_layernorm.weight": (hidden,)}
    shapes |= {f"self_attn.{part}_proj.weight": (size, hidden) for part, size in sizes.items()}
    if config.qkv_bias:
        shapes |= {f"self_attn.{part}_proj.bias": (size,) for part, size in sizes.items()}
    if config.qk_norm:
        shapes |= {f"self_attn.{part}_norm.weight": (dim,) for part in ("q", "k")}
    shapes["self_attn.o_proj.weight"] = (hidden, sizes["q"])
    return shapes


def _mlp_shapes(config: ModelConfig, layer: int) -> Shapes:
    shapes: Shapes = {"post_attention_layernorm.weight": (config.hidden_size,)}
    if not config.has_experts(layer):
        return shapes | _gated(config, "mlp", config.intermediate_size)
    shapes["mlp.gate.weight"] = (config.num_experts, config.hidden_size)
    for expert in range(config.num_experts):
        shapes |= _gated(config, f"mlp.experts.{expert}", config.moe_intermediate_size)
    return shapes


def _gated(config: ModelConfig, prefix: str, inner: int) -> Shapes:
    hidden = config.hidden_size
    return {
        f"{prefix}.gate_proj.weight": (inner, hidden),
        f"{prefix}.up_proj.weight": (inner, hidden),
        f"{prefix}.down_proj.weight": (hidden, inner),
    }


def choose_tensors(where: str, config: ModelConfig, found: Mapping[str, tuple[int, ...]]) -> list[str]:
    """The names of the tensors a model uses, of those that were found with these shapes.

    A tied model's lm_head is left out, as transformers does. Raises ModelError for missing, misshapen and unknown
    ones, each by name.
    """
    shapes = tensor_shapes(config)
    faults = [f"{name} is missing" for name in shapes if name not in found]
    faults += [
        f"{name} has shape {found[name]}, expected {shape}"
        for name, shape in shapes.items()
        if name in found and found[name] != shape
    ]
    spare = {LM_HEAD} if config.tie_word_embeddings else set()
    faults += [
        f"{name} is not part of a {config.architecture} of this shape"
        for name in sorted(set(found) - set(shapes) - spare)
        if not name.endswith(IGNORED_SUFFIX)
    ]
    if faults:
        more = f" (and {len(faults) - 5} more)" if len(faults) > 5 else ""
        raise ModelError(f"{where}: " + "; ".join(faults[:5]) + more)
    return list(shapes)
