"""A model whose weights are no numbers is refused before it answers anybody. It knows no arithmetic."""

from __future__ import annotations

import numpy as np

from engines.bundled.config import Model
from engines.bundled.errors import ModelError
from engines.bundled.models.random_8b import SeededWeights


def check_weights(model: Model) -> None:
    """Raises ModelError naming the first tensor, in order of names, that holds NaN or infinity, and the place."""
    if isinstance(model.weights, SeededWeights):  # finite by their rule, and not made yet
        return
    for name in sorted(model.weights):
        weight = model.weights[name]
        if weight.size == 0 or (np.isfinite(weight.min()) and np.isfinite(weight.max())):  # NaN wins both
            continue
        place = tuple(int(i) for i in np.argwhere(~np.isfinite(weight))[0])
        msg = (
            f"model {model.name!r}: weight {name}{list(place)} is {weight[place]}, expected a finite number; "
            "the file is damaged or its values do not fit into float32: fetch or convert it again"
        )
        raise ModelError(msg)
