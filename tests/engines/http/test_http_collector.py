"""While a client is open no full collection runs, young ones do, and the last client puts everything back."""

import asyncio
import gc
import weakref

import pytest

from engines.http.client import Bounds, Client

BOUNDS = Bounds(silence_s=1.0, request_s=1.0, most_bytes=1000)


class Node:
    """A cycle with itself, which only the collector can end."""

    def __init__(self):
        self.itself = self


def client():
    return Client("http://127.0.0.1:1", None, BOUNDS)


@pytest.fixture
def full_collections():
    """How often the oldest generation was collected since."""
    began = []

    def watch(phase, info):
        if phase == "start" and info["generation"] == 2:
            began.append(info)

    gc.callbacks.append(watch)
    yield began
    gc.callbacks.remove(watch)


def test_only_young_objects_are_collected_while_a_client_is_open(full_collections):
    async def hold():
        async with client():
            del full_collections[:]
            kept = [[number] for number in range(200_000)]
            dropped = [weakref.ref(Node()) for _ in range(5_000)]
            more = [[number] for number in range(200_000)]
            assert len(kept) + len(more) == 400_000
            return sum(reference() is None for reference in dropped)

    assert asyncio.run(hold()) == 5_000
    assert full_collections == []


def test_clients_may_overlap_and_the_last_one_puts_the_thresholds_back():
    before, frozen = gc.get_threshold(), gc.get_freeze_count()

    async def overlap():
        first, second = client(), client()
        await first.__aenter__()
        await second.__aenter__()
        await first.__aexit__(None, None, None)
        held = gc.get_threshold()
        await second.__aexit__(None, None, None)
        return held

    held = asyncio.run(overlap())
    assert held[:2] == before[:2]
    assert held[2] > before[2]
    assert (gc.get_threshold(), gc.get_freeze_count()) == (before, frozen)
