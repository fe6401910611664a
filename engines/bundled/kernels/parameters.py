"""Checks of what callers ask for, the same for every set of kernels. It computes nothing."""

from __future__ import annotations

import numpy as np

from engines.bundled.config import Float32


def check_top_k(k: int, size: int) -> None:
    """Raises ValueError unless 0 <= k <= size."""
    if not 0 <= k <= size:
        raise ValueError(f"k: expected 0 to {size}, got {k}")


def check_draw(logits: Float32, temperature: float, top_k: int, top_p: float, min_p: float, u: float) -> None:
    """Raises ValueError for parameters of `SamplerKernels.draw` out of range, and when no id is left to draw."""
    if not np.float32(temperature) > 0.0 or not np.isfinite(np.float32(temperature)):
        raise ValueError(f"temperature: expected a finite float32 above 0, got {temperature}")
    if top_k < 0:
        raise ValueError(f"top_k: expected 0 or more, got {top_k}")
    if not 0.0 < top_p <= 1.0:
        raise ValueError(f"top_p: expected above 0 and at most 1, got {top_p}")
    if not 0.0 <= min_p <= 1.0:
        raise ValueError(f"min_p: expected 0 to 1, got {min_p}")
    if not 0.0 <= u < 1.0:
        raise ValueError(f"u: expected 0 or more and below 1, got {u}")
    if logits.ndim != 1 or logits.size == 0:
        raise ValueError(f"logits: expected one row (V,), got shape {logits.shape}")
    if not np.isfinite(logits.max()):
        raise ValueError("logits: every id is masked, or a logit is NaN or +inf")


def check_experts(k: int, size: int) -> None:
    """Raises ValueError unless 1 <= k <= size."""
    if not 1 <= k <= size:
        raise ValueError(f"experts per token: expected 1 to {size}, got {k}")


def check_heads(qkv: Float32, q_gain: Float32, k_gain: Float32, kv_heads: int) -> int:
    """How many query heads the rows of qkv (T, (heads + 2 kv_heads) head_dim) hold.

    Raises ValueError if the gains, (head_dim,) each, do not fit them.
    """
    dim = len(q_gain)
    heads, rest = divmod(int(qkv.shape[1]), dim)
    if q_gain.shape != k_gain.shape or rest or heads <= 2 * kv_heads:
        found = f"qkv {qkv.shape}, gains {q_gain.shape} and {k_gain.shape}"
        raise ValueError(f"qkv: expected whole heads of one gain's size, more than {2 * kv_heads} of them, got {found}")
    return heads - 2 * kv_heads
