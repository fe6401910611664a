"""The tiny vision encoder: seeded random weights made in memory, as those of the tiny language model are."""

from __future__ import annotations

import dataclasses
import hashlib
import json

import numpy as np

from engines.bundled.models.tiny import make_tensor
from engines.bundled.vision.config import VisionConfig, VisionModel, tensor_shapes

NAME = "tiny-vit"
DESCRIPTION = "seeded random vision encoder (2 layers, patches of 8 x 8 pixels), made in memory for component cells"
SEED = 60
CONFIG = VisionConfig(
    patch_size=8,
    hidden_size=64,
    intermediate_size=176,
    num_hidden_layers=2,
    num_attention_heads=4,
    head_dim=16,
    rms_norm_eps=1e-5,
    rope_theta=10000.0,
    most_patches=1024,
)


def tiny_vit() -> VisionModel:
    """The encoder, made anew."""
    weights = {
        name: make_tensor(name, shape, np.uint64(SEED + (index << 32)))
        for index, (name, shape) in enumerate(tensor_shapes(CONFIG).items())
    }
    digest = hashlib.sha256(json.dumps(dataclasses.asdict(CONFIG), sort_keys=True).encode())
    for name in sorted(weights):
        digest.update(f"\n{name} {weights[name].shape}\n".encode())
        digest.update(np.ascontiguousarray(weights[name], dtype="<f4").data)
    return VisionModel(name=NAME, config=CONFIG, weights=weights, digest=digest.hexdigest())
