"""The digest of a model: SHA-256 over its shape and its float32 weights, whatever file they came from.

Rule: a field that holds its default is left out, so that a field which only some families have renames no older model.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping

import numpy as np

from engines.bundled.config import Float32, ModelConfig


def model_digest(config: ModelConfig, weights: Mapping[str, Float32]) -> str:
    """SHA-256, in hex, over the config as sorted JSON and each tensor's name, shape and little-endian bytes."""
    digest = hashlib.sha256(json.dumps(_described(config), sort_keys=True).encode())
    for name in sorted(weights):
        tensor = weights[name]
        digest.update(f"\n{name} {tensor.shape}\n".encode())
        digest.update(np.ascontiguousarray(tensor, dtype="<f4").data)
    return digest.hexdigest()


def _described(config: ModelConfig) -> dict[str, object]:
    values = dataclasses.asdict(config)
    return {f.name: values[f.name] for f in dataclasses.fields(config) if values[f.name] != f.default}
