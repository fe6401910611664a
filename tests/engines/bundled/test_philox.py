"""Philox against the known answers of the Random123 library, and what a draw depends on."""

import pytest

from engines.bundled.philox import DRAFT_STREAM, TARGET_STREAM, philox4x32, uniform

KNOWN = [  # kat_vectors of Random123, lines "philox4x32 10"
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    (
        (0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF),
        (0xFFFFFFFF, 0xFFFFFFFF),
        (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
    ),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN)
def test_known_answers(counter, key, words):
    assert philox4x32(counter, key) == words


def test_a_draw_is_the_top_24_bits_of_word_0():
    seed = 0x299F31D0_A4093822  # key = (low, high)
    word = philox4x32((5, 2, DRAFT_STREAM, 0), (0xA4093822, 0x299F31D0))[0]
    assert uniform(seed, 5, 2, DRAFT_STREAM) == (word >> 8) / 2**24


def test_every_part_of_the_counter_and_both_halves_of_the_seed_count():
    draws = {
        uniform(1, 5, 0, TARGET_STREAM),
        uniform(1 + 2**32, 5, 0, TARGET_STREAM),
        uniform(2, 5, 0, TARGET_STREAM),
        uniform(1, 6, 0, TARGET_STREAM),
        uniform(1, 5, 1, TARGET_STREAM),
        uniform(1, 5, 0, DRAFT_STREAM),
    }
    assert len(draws) == 6
    assert all(0 <= u < 1 for u in draws)
