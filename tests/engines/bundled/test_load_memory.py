"""Loading a sharded model keeps little more than its weights in memory: the benchmark's measure, on a small shape."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[3]))

from benchmarks.load_memory import SHAPES, measure


@pytest.mark.parametrize("dtype", ["BF16", "F32", "Q8_0"])
def test_private_memory_stays_near_the_weights_held(dtype):
    config = replace(SHAPES["small"], vocab_size=8192)
    found = measure(config, dtype, shard=1 << 24)
    assert found["file_bytes"] > (30 if dtype == "Q8_0" else 60) << 20
    assert found["weights_held"] > 120 << 20
    taken = found["private_peak"] - found["private_before"]
    mapped = found["largest_matrix"]  # an embedding in F32 is, and so is a GGUF's once it is converted
    assert found["weights_held"] - mapped < taken < found["allowed"]
