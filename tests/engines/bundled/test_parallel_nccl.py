"""Ranks over NCCL: with a GPU for each the bits of one process; with fewer, the reason is what is checked."""

import dataclasses

import numpy as np
import pytest
import torch
from arithmetic_cases import options, same
from test_parallel_ranks import DENSE, alone, equal, opened, run

from engines.bundled.errors import RankError
from engines.bundled.parallel.group import Group, open_store
from engines.bundled.parallel.ranks import open_parallel
from engines.bundled.parallel.wire import CollectiveError

GPUS = torch.cuda.device_count()


def test_a_group_of_one_copies_bits_or_says_that_there_is_no_gpu():
    """The calls themselves; a second rank needs a second GPU."""
    store = open_store(0, 1, 60.0)
    if not GPUS:
        with pytest.raises(RankError, match="collectives=nccl: 1 ranks need a GPU each, 0 are here"):
            Group(store, 0, 1, "nccl", 60.0)
        return
    group = Group(store, 0, 1, "nccl", 60.0)
    values = np.array([[-0.0, 1e-45, 3.0], [np.pi, -1e38, 0.0]], np.float32)
    assert same(group.gather(values), values[None])
    assert same(group.all_reduce(values), values)
    numbers = np.arange(7, dtype=np.int32)
    group.broadcast(numbers)
    assert numbers.tolist() == list(range(7))
    group.close()


def test_two_ranks_over_nccl_give_the_bits_of_one_or_say_what_is_missing():
    if GPUS < 2:
        config = dataclasses.replace(options(num_pages=8), tensor_parallel_size=2, collectives="nccl")
        with pytest.raises(RankError, match=f"collectives=nccl: 2 ranks need a GPU each, {GPUS} are here"):
            open_parallel("tiny", DENSE, config)
        return
    arithmetic = opened("tiny", DENSE, tensor_parallel_size=2, collectives="nccl")
    try:
        assert equal(run(arithmetic), alone(DENSE)) == [True] * 3
    finally:
        arithmetic.close()


class Waiting:
    """A collective that a lost rank keeps from ending."""

    def is_completed(self):
        return False


def waiting_group(deadline_s, watch):
    group = Group.__new__(Group)
    group.rank, group._deadline_s, group._watch, group._broken = 0, deadline_s, watch, False
    group._device, group._backend = torch.device("cuda", 0), None
    return group


def test_a_collective_on_cards_ends_by_its_deadline_or_when_a_process_is_gone():
    """NCCL itself would wait."""

    def gone():
        raise CollectiveError("rank 1 (process 7) ended")

    silent = waiting_group(0.1, lambda: None)
    with (
        pytest.raises(CollectiveError, match="rank 0: all-gather failed: not over after 0 s"),
        silent._collective("all-gather"),
    ):
        silent._wait(Waiting())
    lost = waiting_group(60.0, gone)
    with pytest.raises(CollectiveError, match=r"rank 1 \(process 7\) ended"), lost._collective("all-gather"):
        lost._wait(Waiting())
    assert silent._broken
    assert lost._broken


def test_an_interrupted_collective_leaves_a_group_that_is_not_waited_for():
    def interrupted():
        raise KeyboardInterrupt

    group = waiting_group(60.0, interrupted)
    with pytest.raises(KeyboardInterrupt), group._collective("all-gather"):
        group._wait(Waiting())
    assert group._broken
