"""The tiny model with other numbers of heads, for tests of what follows the shape."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from gpu_cases import family

from engines.bundled.config import Model
from engines.bundled.models.tensors import tensor_shapes


def resized(**changes) -> Model:
    """`gpu_cases.family`, matrices of other sizes drawn anew."""
    model = family(**changes)
    sizes, random = tensor_shapes(model.config), np.random.default_rng(6)
    weights = {
        name: held if held.shape == sizes[name] else random.normal(0, 0.15, sizes[name]).astype(np.float32)
        for name, held in model.weights.items()
    }
    return replace(model, weights=weights)
