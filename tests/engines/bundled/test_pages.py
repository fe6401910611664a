"""The page pool: nothing is handed out twice, everything comes back."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.bundled.pages import Pages


def test_pages_needed_round_up_and_count_what_is_held():
    pages = Pages(8, 4)
    assert [pages.needed(tokens, held=0) for tokens in (0, 1, 4, 5, 8, 9)] == [0, 1, 1, 2, 2, 3]
    assert pages.needed(9, held=2) == 1
    assert pages.needed(4, held=2) == 0


def test_taking_more_than_is_free_is_an_error_and_takes_nothing():
    pages = Pages(3, 4)
    pages.allocate(2)
    assert not pages.can_allocate(2)
    with pytest.raises(ValueError, match="2 pages asked for, 1 of 3 free"):
        pages.allocate(2)
    assert pages.free == 1


def test_a_page_comes_back_once():
    pages = Pages(3, 4)
    held = pages.allocate(1)
    pages.release(held)
    with pytest.raises(ValueError, match="page 0 was given back but is not held"):
        pages.release(held)


def test_the_first_handing_out_follows_the_given_order():
    assert Pages(4, 1, [2, 0, 3, 1]).allocate(3) == [2, 0, 3]
    with pytest.raises(ValueError, match=r"expected a permutation of 0..3"):
        Pages(4, 1, [0, 1, 2, 2])


@settings(deadline=None)
@given(st.lists(st.integers(-4, 4), max_size=60), st.integers(1, 9))
def test_no_page_has_two_owners(moves, count):
    """A positive move takes that many pages, a negative one gives the oldest holding back."""
    pages, holdings = Pages(count, 4), []
    for move in moves:
        if move > 0 and pages.can_allocate(move):
            holdings.append(pages.allocate(move))
        elif move < 0 and holdings:
            pages.release(holdings.pop(0))
        held = [page for holding in holdings for page in holding]
        assert len(set(held)) == len(held)
        assert set(held) <= set(range(count))
        assert pages.free == count - len(held)
