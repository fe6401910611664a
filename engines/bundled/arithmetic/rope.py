"""The table of cosines and sines for rotary position embedding, correctly rounded to float32.

It does not know kernels or layouts. Rules: the angle is the float32 product of position and inverse frequency; its
cosine and sine are the float32 nearest to the exact values, whatever the C library's last bits are. A float64 estimate
decides where it cannot be wrong; the rest is computed in integers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from decimal import Decimal, localcontext
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from engines.bundled.config import Float32, ModelConfig, RopeScaling

Float64 = npt.NDArray[np.float64]

# A float64 cosine or sine is taken as wrong by up to this much, relative and absolute; libraries do far better.
_RELATIVE, _ABSOLUTE = 2.0**-44, 2.0**-70
_BITS = 300  # fixed point of the exact path: float32 angles need 24 + 149, the rest is room for rounding
_GUARD = 40  # low bits that the exact path does not trust


def inverse_frequencies(head_dim: int, theta: float, scaling: RopeScaling | None = None) -> Float32:
    """(head_dim / 2,) float32: 1 / p by IEEE division, p = theta ** e, e = 2 i / head_dim rounded to float32; scaled.

    The power is exact, rounded to float64 and then to float32. Source: the `default`, `linear` and `llama3` ropes of
    Hugging Face transformers, whose float32 operations are repeated one by one; they leave the last bit of the power
    to the library.

    Raises:
        ValueError: a scaling of another kind, or factors that are not head_dim / 2.
    """
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    with localcontext() as context:
        context.prec = 60
        powers = [float(Decimal(theta) ** Decimal(float(e))) for e in exponents]
    frequency: Float32 = np.float32(1.0) / np.array(powers, np.float32)
    return frequency if scaling is None else _scale(frequency, scaling)


def _scale(frequency: Float32, scaling: RopeScaling) -> Float32:
    if scaling.kind == "linear":
        return frequency / np.float32(scaling.factor)
    if scaling.kind == "llama3":
        return _scale_llama3(frequency, scaling)
    if scaling.kind == "factors" and len(scaling.factors) == len(frequency):
        factors: Float32 = np.array(scaling.factors, np.float32)
        return frequency / factors
    found = f"{scaling.kind!r} with {len(scaling.factors)} factors for {len(frequency)} frequencies"
    raise ValueError(f"rope scaling: expected linear, llama3, or factors with one for each frequency, got {found}")


def _scale_llama3(frequency: Float32, scaling: RopeScaling) -> Float32:
    """Long waves are stretched by `factor`, short ones kept, those between blended; torch's scalar / tensor is a
    reciprocal and a product.
    """
    one, length = np.float32(1.0), float(scaling.original_max_position_embeddings)
    low, high, factor = scaling.low_freq_factor, scaling.high_freq_factor, np.float32(scaling.factor)
    wave = (one / frequency) * np.float32(2.0 * math.pi)
    stretched = np.where(wave > np.float32(length / low), frequency / factor, frequency)
    smooth = ((one / wave) * np.float32(length) - np.float32(low)) / np.float32(high - low)
    blended = (one - smooth) * stretched / factor + smooth * stretched
    between = ~(wave < np.float32(length / high)) & ~(wave > np.float32(length / low))
    return np.where(between, blended, stretched)


def model_rope_table(config: ModelConfig, positions: int) -> Float32:
    """`rope_table` of a model."""
    return rope_table(positions, config.head_dim, config.rope_theta, config.rope_scaling)


@lru_cache(maxsize=4)
def rope_table(positions: int, head_dim: int, theta: float, scaling: RopeScaling | None = None) -> Float32:
    """(positions, head_dim) float32, read-only: cosines of the head_dim / 2 angles of a position, then their sines."""
    frequency = inverse_frequencies(head_dim, theta, scaling)
    return angle_table(np.arange(positions, dtype=np.float32)[:, None] * frequency[None, :])


def angle_table(angle: Float32) -> Float32:
    """(P, d) float32, read-only, of angles (P, d / 2) of 0 and more: their cosines, then their sines."""
    wide = angle.astype(np.float64)
    cosine = _round(np.cos(wide), angle, exact_cosine)
    sine = _round(np.sin(wide), angle, exact_sine)
    table = np.ascontiguousarray(np.concatenate([cosine, sine], axis=1))
    table.flags.writeable = False
    return table


def _round(estimate: Float64, angle: Float32, exact: Callable[[float], np.float32]) -> Float32:
    """The float32 nearest to the exact value; elements whose estimate lies near a tie are computed exactly."""
    slack = np.abs(estimate) * _RELATIVE + _ABSOLUTE
    low, high = (estimate - slack).astype(np.float32), (estimate + slack).astype(np.float32)
    rounded = estimate.astype(np.float32)
    for index in np.argwhere(low.view(np.int32) != high.view(np.int32)):
        where = tuple(index)
        rounded[where] = exact(float(angle[where]))
    return rounded


def exact_cosine(angle: float) -> np.float32:
    """The float32 nearest to cos(angle), angle >= 0, by integer arithmetic."""
    quadrant, rest = divmod(_fixed(angle), _half_pi())
    value = _sine_series(rest) if quadrant % 2 else _cosine_series(rest)
    return _nearest(-value if quadrant % 4 in (1, 2) else value)


def exact_sine(angle: float) -> np.float32:
    """The float32 nearest to sin(angle), angle >= 0, by integer arithmetic."""
    quadrant, rest = divmod(_fixed(angle), _half_pi())
    value = _cosine_series(rest) if quadrant % 2 else _sine_series(rest)
    return _nearest(-value if quadrant % 4 in (2, 3) else value)


def _fixed(angle: float) -> int:
    numerator, denominator = angle.as_integer_ratio()
    return (numerator << _BITS) // denominator


@lru_cache(maxsize=1)
def _half_pi() -> int:
    """Pi / 2 in fixed point, by Machin's formula: pi / 4 = 4 atan(1/5) - atan(1/239)."""
    return (2 * (4 * _arctangent(5) - _arctangent(239))) >> 64


def _arctangent(inverse: int) -> int:
    """atan(1 / inverse) with 64 bits more than the fixed point."""
    term = (1 << (_BITS + 64)) // inverse
    total, divisor, sign = 0, 1, 1
    while term:
        total += sign * (term // divisor)
        term //= inverse * inverse
        divisor, sign = divisor + 2, -sign
    return total


def _sine_series(x: int) -> int:
    return _series(x, x, 1)


def _cosine_series(x: int) -> int:
    return _series(1 << _BITS, x, 0)


def _series(first: int, x: int, order: int) -> int:
    square = (x * x) >> _BITS
    total, term = first, first
    while term:
        term = (term * square) >> _BITS
        term //= (order + 1) * (order + 2)
        order += 2
        total += -term if order % 4 in (2, 3) else term
    return total


def _nearest(value: int) -> np.float32:
    """Fixed point to the nearest float32. Raises ArithmeticError where the untrusted bits could decide."""
    lower, upper = (_to_float32(value + shift) for shift in (-(1 << _GUARD), 1 << _GUARD))
    if lower != upper:
        raise ArithmeticError(f"rope: {value} is too near a tie of float32 for {_BITS} bits")
    return lower


def _to_float32(value: int) -> np.float32:
    """Round to nearest even of a fixed-point integer; values below the float32 normals do not occur in the table."""
    magnitude = abs(value)
    shift = max(magnitude.bit_length() - 24, 0)
    kept, rest, half = magnitude >> shift, magnitude & ((1 << shift) - 1), (1 << shift) >> 1
    if shift and (rest > half or (rest == half and kept & 1)):
        kept += 1
    result = np.float32(np.ldexp(float(kept), shift - _BITS))
    return -result if value < 0 else result
