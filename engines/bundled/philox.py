"""Philox4x32-10, the counter-based random generator every draw comes from. It holds no state.

Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011); checked against
the known-answer vectors of the Random123 library. Rules: a draw is a function of (seed, token index, sample,
stream) and of nothing else, so no schedule can move it.
"""

from __future__ import annotations

TARGET_STREAM = 0  # draws of the model itself
DRAFT_STREAM = 1  # draws of a draft model

_ROUNDS = 10
_MULTIPLIER_0, _MULTIPLIER_2 = 0xD2511F53, 0xCD9E8D57
_WEYL_0, _WEYL_1 = 0x9E3779B9, 0xBB67AE85  # golden ratio and sqrt(3) - 1
_WORD = 0xFFFFFFFF

Counter = tuple[int, int, int, int]
Key = tuple[int, int]


def philox4x32(counter: Counter, key: Key) -> Counter:
    """Four 32-bit words from a 128-bit counter and a 64-bit key, ten rounds."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        p0, p2 = _MULTIPLIER_0 * c0, _MULTIPLIER_2 * c2
        c0, c1, c2, c3 = (p2 >> 32) ^ c1 ^ k0, p2 & _WORD, (p0 >> 32) ^ c3 ^ k1, p0 & _WORD
        k0, k1 = (k0 + _WEYL_0) & _WORD, (k1 + _WEYL_1) & _WORD
    return c0, c1, c2, c3


def uniform(seed: int, index: int, sample: int, stream: int) -> float:
    """A float32-exact number in [0, 1), a multiple of 2^-24.

    Args:
        seed: the request's unsigned 64-bit seed.
        index: index of the token being drawn, counted from the prompt's start.
        sample: which of the request's n samples.
        stream: TARGET_STREAM or DRAFT_STREAM.
    """
    word = philox4x32((index, sample, stream, 0), (seed & _WORD, seed >> 32))[0]
    return (word >> 8) * 2.0**-24
