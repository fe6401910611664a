"""What the GPU benchmarks say about bits, and with which exit code: nothing is green that was not compared."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[4] / "benchmarks"))

from gpu_bits import wrong_bits
from gpu_tensorcore import HERE, conclude

GOOD = {
    "census": {"copies": 3, "distinct": 1, "equal to the prompt alone": 3},
    "alone": {"requests": 8, "differ shuffled": 0, "differ alone": 0},
    "memory": {"before": (1, 2, 30), "after": (1, 5, 30), "same tokens": True},
    "ranks": {"logits": 99, "2 ranks, differing": 0, "2 ranks, bytes of each": [5, 5],
              "2 ranks that round, differing": 7, "2 ranks that round, bytes of each": [5, 5]},
    "reports": {"32 rows, 20 largest, ms": 0.5, "32 rows, differing": 0},
}  # fmt: skip
BAD = [
    ("census", {"distinct": 2}, "2 distinct completions of one prompt"),
    ("census", {"equal to the prompt alone": 0}, "0 of 3 copies equal the prompt alone"),
    ("alone", {"differ shuffled": 1}, "1 of 8 requests differ shuffled"),
    ("alone", {"differ alone": 4}, "4 of 8 requests differ alone"),
    ("memory", {"same tokens": False}, "the same requests got other tokens the second time"),
    ("memory", {"after": (1, 2, 29)}, "30 pages were free before the same requests, 29 after them"),
    ("ranks", {"2 ranks, differing": 1}, "2 ranks: 1 logits differ"),
    ("ranks", {"2 ranks that round, differing": 0},
     "2 ranks that round: no logit differs, so the comparison shows nothing"),
    ("reports", {"32 rows, differing": 3}, "reports of 32 rows: 3 differ"),
]  # fmt: skip


@pytest.mark.parametrize(("section", "change", "words"), BAD)
def test_other_bits_of_tensorcore_fail_the_benchmark(capsys, section, change, words):
    assert wrong_bits(GOOD) == wrong_bits({}) == []
    bad = {**GOOD, section: {**GOOD[section], **change}}
    assert wrong_bits(bad) == [words]
    assert conclude({"tensorcore": GOOD, "native": bad}, {}) == 0  # which promises nothing
    assert conclude({"tensorcore": GOOD, "tensorcore tree": bad}, {}) == 1
    assert f"tensorcore tree: {words}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--sections", "model"), "invalid choice: 'model'"),
        (("--skip", "model"), "invalid choice: 'model'"),
        (("--sections", "decode-ab", "models"), "decode-ab goes alone"),
    ],
)
def test_a_section_there_is_not_is_an_error_and_not_left_out(options, words):
    command = [sys.executable, str(HERE / "gpu_portable.py"), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 2
    assert words in done.stderr
