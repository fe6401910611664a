"""What a vision encoder is (shape and weights). No image formats, no arithmetic."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from engines.bundled.config import Float32


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionConfig:
    """A Pixtral-style ViT with SwiGLU: no biases, RMSNorm, rope over rows and columns of patches."""

    patch_size: int  # pixels along each side of a patch
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    head_dim: int  # a multiple of 4: half of the pairs turn by row, half by column
    rms_norm_eps: float
    rope_theta: float
    most_patches: int  # of one image

    @property
    def patch_columns(self) -> int:
        """Numbers in a patch: three colours."""
        return 3 * self.patch_size**2

    @property
    def chunk_width(self) -> int:
        """Width of a chunk of K in product sums: that of a model without KV groups (docs/numerics.md)."""
        return 256


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class VisionModel:
    """Weights in float32 under Hugging Face's names of PixtralVisionModel; `patch_conv.weight` is (hidden, 3 p p)."""

    name: str
    config: VisionConfig
    weights: Mapping[str, Float32]
    digest: str  # SHA-256 over config and weights


def tensor_shapes(config: VisionConfig) -> dict[str, tuple[int, ...]]:
    """Name to shape of every tensor, in the order in which the encoder uses them."""
    hidden, inner, heads = config.hidden_size, config.intermediate_size, config.num_attention_heads * config.head_dim
    layer = {
        "attention_norm": (hidden,),
        "attention.q_proj": (heads, hidden),
        "attention.k_proj": (heads, hidden),
        "attention.v_proj": (heads, hidden),
        "attention.o_proj": (hidden, heads),
        "ffn_norm": (hidden,),
        "feed_forward.gate_proj": (inner, hidden),
        "feed_forward.up_proj": (inner, hidden),
        "feed_forward.down_proj": (hidden, inner),
    }
    shapes: dict[str, tuple[int, ...]] = {
        "patch_conv.weight": (hidden, config.patch_columns),
        "ln_pre.weight": (hidden,),
    }
    for index in range(config.num_hidden_layers):
        shapes |= {f"transformer.layers.{index}.{name}.weight": shape for name, shape in layer.items()}
    return shapes
