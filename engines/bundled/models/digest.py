"""The digest of a model: SHA-256 over its shape and its float32 weights, whatever file they came from."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping

import numpy as np

from engines.bundled.config import Float32, ModelConfig


def model_digest(config: ModelConfig, weights: Mapping[str, Float32]) -> str:
    """SHA-256, in hex, over the config as sorted JSON and each tensor's name, shape and little-endian bytes."""
    digest = hashlib.sha256(json.dumps(dataclasses.asdict(config), sort_keys=True).encode())
    for name in sorted(weights):
        tensor = weights[name]
        digest.update(f"\n{name} {tensor.shape}\n".encode())
        digest.update(np.ascontiguousarray(tensor, dtype="<f4").data)
    return digest.hexdigest()
