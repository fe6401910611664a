"""Cores are dealt out once, physical ones first, and a process bound to some comes back from it."""

import os
import threading

import pytest

from engines.bundled.parallel.cores import deal_cores, pin, usable_cores


@pytest.mark.parametrize(
    ("cores", "ranks", "threads", "dealt"),
    [
        ([0, 1], 2, 1, ((0,), (1,))),
        ([4, 5, 6, 7, 9], 2, 2, ((4, 5), (6, 7))),
        ([0, 1], 3, 1, ((), (), ())),
        ([0, 1], 1, 3, ((),)),
        ([3], 1, 1, ((3,),)),
    ],
)
def test_each_rank_has_its_own_or_nobody_has(cores, ranks, threads, dealt):
    assert deal_cores(cores, ranks, threads) == dealt


def test_the_second_thread_of_a_core_comes_last(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3, 7})
    for core, siblings in enumerate(["0-1", "0-1", "2,3", "2,3"]):
        folder = tmp_path / f"cpu{core}" / "topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(f"{siblings}\n")
    assert usable_cores(tmp_path) == [0, 2, 7, 1, 3]  # of core 7 nothing is known


def test_every_thread_is_bound_and_comes_back():
    available = sorted(os.sched_getaffinity(0))
    release, seen = threading.Event(), []

    def wait():
        seen.append(threading.get_native_id())
        release.wait(30)

    worker = threading.Thread(target=wait)
    worker.start()
    try:
        while not seen:
            pass
        assert pin(available[:1]) == available
        assert os.sched_getaffinity(0) == os.sched_getaffinity(seen[0]) == {available[0]}
        assert pin(available) == available[:1]
        assert os.sched_getaffinity(0) == os.sched_getaffinity(seen[0]) == set(available)
        assert pin([]) == available
        assert os.sched_getaffinity(0) == set(available)
    finally:
        release.set()
        worker.join()
