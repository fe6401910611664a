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
