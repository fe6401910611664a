"""The prefix cache: what its keys cover, what is found, what is forgotten, and what requests get from it."""

import dataclasses

import pytest
from engine_cases import evidence, greedy, options, request, run_all, scripted_engine
from hypothesis import given
from hypothesis import strategies as st

from engines.bundled.pages import Pages
from engines.bundled.prefix import Origin, PrefixCache

ORIGIN = Origin(model="m", arithmetic="portable", definition=1, tuning=0, page_size=4)
OTHERS = {
    "model": "n",
    "arithmetic": "free",
    "definition": 2,
    "tuning": 1,
    "page_size": 2,
    "adapter": "a",
    "images": "i",
}


def cached_engine(**changes):
    return scripted_engine(options(prefix_cache=True, **changes))


def run_one(one, **changes):
    return run_all(scripted_engine(options(**changes)), [one])[0]


# Keys


def test_only_whole_pages_have_keys_and_known_ones_are_not_made_again():
    cache = PrefixCache(ORIGIN)
    keys = cache.keys(range(11))
    assert len(keys) == 2
    assert cache.keys(range(11), keys[:1]) == keys
    assert cache.keys(range(3)) == []


@pytest.mark.parametrize("name", sorted(OTHERS))
def test_a_key_covers_everything_its_page_comes_from(name):
    other = dataclasses.replace(ORIGIN, **{name: OTHERS[name]})
    assert set(OTHERS) == {field.name for field in dataclasses.fields(Origin)}
    assert not set(PrefixCache(ORIGIN).keys(range(8))) & set(PrefixCache(other).keys(range(8)))


@given(st.lists(st.integers(0, 9), min_size=8, max_size=8), st.integers(0, 7), st.integers(1, 9))
def test_one_other_token_changes_the_keys_of_its_page_and_of_all_after_it(tokens, place, by):
    other = list(tokens)
    other[place] += by
    a, b = (PrefixCache(ORIGIN).keys(some) for some in (tokens, other))
    assert [x == y for x, y in zip(a, b, strict=True)] == [page < place // 4 for page in range(2)]


def test_tokens_are_told_apart_where_their_digits_run_together():
    one, two = (PrefixCache(ORIGIN).keys(tokens) for tokens in ((1, 23, 4, 5), (12, 3, 4, 5)))
    assert one != two


def test_lookup_ends_at_the_first_page_that_is_not_there():
    cache = PrefixCache(ORIGIN)
    keys = cache.keys(range(12))
    cache.publish(keys, [5, 6, 7])
    assert cache.lookup(keys) == [5, 6, 7]
    cache.forget([6, 9])
    assert (cache.lookup(keys), len(cache)) == ([5], 2)


def test_a_page_that_is_known_by_its_key_stays_when_another_holds_the_same():
    cache = PrefixCache(ORIGIN)
    keys = cache.keys(range(4))
    cache.publish(keys, [5])
    cache.publish(keys, [8])
    cache.forget([8])
    assert cache.lookup(keys) == [5]


# Shared pages


def test_a_shared_page_is_free_after_its_last_holder_and_waits_at_the_end():
    pages = Pages(3, 4)
    first = pages.allocate(1)
    pages.share(first)
    pages.release(first)
    assert (pages.free, pages.is_free(first[0])) == (2, False)
    pages.release(first)
    assert pages.is_free(first[0])
    assert pages.allocate(3) == [1, 2, 0]
    with pytest.raises(ValueError, match="page 1 was given back but is not held"):
        pages.release([1, 1])


def test_a_free_page_can_be_taken_up_again_out_of_turn():
    pages = Pages(3, 4)
    pages.share([2])
    assert pages.allocate(2) == [0, 1]
    with pytest.raises(ValueError, match="1 pages asked for, 0 of 3 free"):
        pages.allocate(1)


# What requests get


def test_full_partial_and_foreign_hits_compute_less_and_give_the_same():
    prompt = tuple(range(1, 22))
    engine = cached_engine()
    (cold,) = run_all(engine, [request("cold", prompt)])
    warm = request("warm", prompt)
    partial = request("partial", (*prompt[:9], 50, 51, 52))
    foreign = request("foreign", (*prompt[:4], *prompt[9:]))
    miss = request("miss", (50, *prompt[1:]))
    found = run_all(engine, [warm, partial, foreign, miss])
    assert (cold.cached_tokens, [one.cached_tokens for one in found]) == (0, [20, 8, 4, 0])
    for one, sequence in zip((warm, partial, foreign, miss), found, strict=True):
        assert evidence(sequence) == evidence(run_one(one))
        ran = [row for row in engine.log if row.sequence is sequence]
        assert ran[0].start == sequence.cached_tokens


def test_the_last_token_is_always_computed():
    engine = cached_engine()
    prompt = range(1, 9)  # two whole pages
    run_all(engine, [request("a", prompt)])
    (again,) = run_all(engine, [request("b", prompt)])
    assert again.cached_tokens == 4


def test_output_of_one_request_serves_the_prompt_of_another():
    engine = cached_engine()
    (first,) = run_all(engine, [request("a", [1, 2, 3], greedy(max_tokens=9))])
    one = request("b", first.tokens)
    (second,) = run_all(engine, [one])
    assert second.cached_tokens == 8
    assert evidence(second) == evidence(run_one(one))


def test_a_page_handed_out_again_is_forgotten():
    engine = cached_engine(num_pages=7)
    run_all(engine, [request("a", range(1, 14))])
    run_all(engine, [request("b", range(30, 48))])  # takes all but two pages, the oldest first
    one = request("c", range(1, 14))
    (again,) = run_all(engine, [one])
    assert again.cached_tokens < 12
    assert evidence(again) == evidence(run_one(one))
    assert len(engine.cache) <= 7


def test_tokens_that_are_not_final_do_not_enter(monkeypatch):
    monkeypatch.setattr("engines.bundled.sequence.Sequence.cacheable", property(lambda self: min(self.computed, 5)))
    engine = cached_engine()
    run_all(engine, [request("a", range(1, 22))])
    assert len(engine.cache) == 1


def test_a_reset_keeps_the_cache_and_nothing_else():
    engine = cached_engine()
    run_all(engine, [request("a", range(1, 22))])
    engine.reset()
    engine.check_pages()
    (again,) = run_all(engine, [request("a", range(1, 22))])
    assert again.cached_tokens == 20


def test_a_preempted_request_finds_its_own_pages():
    requests = [request(f"r{i}", range(i + 1, i + 8), greedy(max_tokens=20)) for i in range(4)]
    engine = cached_engine(num_pages=8)
    together = run_all(engine, requests)
    assert sum(sequence.restored_tokens for sequence in together) > 0
    assert [evidence(s) for s in together] == [evidence(run_one(one)) for one in requests]
