"""Is a product of matrices the one the definition asks for? Compared with the twin, bit for bit.

It does not know who computes the product. Rules: inputs are derived from integers, so that every machine checks the
same ones; ordinary, widely spread and subnormal values are all among them; every element is compared.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import numpy as np

from engines.bundled import twin
from engines.bundled.config import Float32
from engines.bundled.kernels.interface import KernelError

Product = Callable[[Float32, Float32, int], Float32]
Spread = Literal["ordinary", "wide", "subnormal"]
SPREADS: tuple[Spread, ...] = ("ordinary", "wide", "subnormal")


def values(shape: tuple[int, ...], seed: int, spread: Spread) -> Float32:
    """Test data: uniform in (-1, 1); the same over 40 powers of two; or so small that products are subnormal."""
    random = np.random.Generator(np.random.PCG64(seed))
    mantissa: Float32 = random.integers(-(2**23) + 1, 2**23, shape).astype(np.float32) * np.float32(2.0**-23)
    if spread == "ordinary":
        return mantissa
    low, high = (-20, 20) if spread == "wide" else (-72, -62)
    return np.ldexp(mantissa, random.integers(low, high, shape)).astype(np.float32)


def agrees(product: Product, weight: Float32, width: int, rows: int) -> bool:
    """Does `product(x, weight, width)` equal the twin in every bit, for this weight and for subnormal data?"""
    for seed, spread in enumerate(SPREADS):
        x = values((rows, weight.shape[1]), seed, spread)
        # Subnormal products need small weights too; the others meet the weights that will be used.
        w = values((min(len(weight), 64), weight.shape[1]), seed, spread) if spread == "subnormal" else weight
        expected = twin.linear(x, w, width)
        if not np.array_equal(product(x, w, width).view(np.int32), expected.view(np.int32)):
            return False
    return True


def check_environment() -> None:
    """Checks that numpy rounds to nearest even and keeps subnormals.

    Raises:
        KernelError: it does not.
    """
    normal, tie = np.float32(2.0**-126), np.float32(2.0**-24)
    half = np.multiply(np.full(16, normal), np.float32(0.5))
    sums = np.add(np.full(16, np.float32(1.0)), tie)
    kept = np.array_equal(half.view(np.int32), np.full(16, 0x400000, np.int32))
    if not (kept and np.array_equal(half + half, np.full(16, normal)) and np.array_equal(sums, np.ones(16))):
        raise KernelError(
            "self-check of the fallback without a compiler: numpy flushes subnormals or does not round to nearest "
            "in this thread; something set the floating-point mode (torch.set_flush_denormal?), or install g++"
        )
