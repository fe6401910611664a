"""The encoder's definition executed slowly and readably, one image at a time."""

from __future__ import annotations

import numpy as np

from engines.bundled import twin
from engines.bundled.arithmetic.order import KEY_CHUNK
from engines.bundled.config import Float32
from engines.bundled.vision.config import VisionModel
from engines.bundled.vision.encoder import grid_table
from engines.bundled.vision.picture import Patches


def encode(model: VisionModel, image: Patches) -> Float32:
    """(patches, hidden)."""
    c, w = model.config, model.weights
    table, half = grid_table(c, image.rows, image.columns)[:, None, :], c.head_dim // 2
    hidden = twin.linear(image.values, w["patch_conv.weight"], c.chunk_width)
    hidden = twin.rms_norm(hidden, w["ln_pre.weight"], c.rms_norm_eps)
    for index in range(c.num_hidden_layers):
        prefix = f"transformer.layers.{index}"
        normed = twin.rms_norm(hidden, w[f"{prefix}.attention_norm.weight"], c.rms_norm_eps)
        q, k, v = (
            twin.linear(normed, w[f"{prefix}.attention.{part}_proj.weight"], c.chunk_width).reshape(
                len(normed), -1, c.head_dim
            )
            for part in "qkv"
        )
        q, k = (twin.rotate(part, table[..., :half], table[..., half:]) for part in (q, k))
        out = np.stack(
            [twin.attention(q[:, head], k[:, head], v[:, head], KEY_CHUNK) for head in range(c.num_attention_heads)],
            axis=1,
        )
        attended = out.reshape(len(out), -1)
        hidden = hidden + twin.linear(attended, w[f"{prefix}.attention.o_proj.weight"], c.chunk_width)
        normed = twin.rms_norm(hidden, w[f"{prefix}.ffn_norm.weight"], c.rms_norm_eps)
        gate, up = (
            twin.linear(normed, w[f"{prefix}.feed_forward.{part}_proj.weight"], c.chunk_width)
            for part in ("gate", "up")
        )
        hidden = hidden + twin.linear(
            twin.swiglu(gate, up), w[f"{prefix}.feed_forward.down_proj.weight"], c.chunk_width
        )
    return hidden
