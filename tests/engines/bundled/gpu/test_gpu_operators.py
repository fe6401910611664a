"""Every GPU kernel by itself under the host emulation, and that the start-up check finds what is wrong."""

from __future__ import annotations

import gpu_cases
import numpy as np
import pytest

from engines.bundled import twin
from engines.bundled.gpu import emulated, selfcheck, source
from engines.bundled.gpu.arguments import FIELDS, FUSED_FIELDS, pack_arguments
from engines.bundled.gpu.cases import Operators, Pair, hashed
from engines.bundled.gpu.emulated import EmulatedMachine
from engines.bundled.gpu.interface import GpuError
from engines.bundled.gpu.portable import shape_of
from engines.bundled.gpu.selfcheck import check_arithmetic, check_fused, expert_pairs, operator_pairs, window_pairs
from engines.bundled.kernels.library import load


def test_every_kernel_has_the_bits_of_the_cpu_on_all_kinds_of_data():
    shape = shape_of(gpu_cases.tiny().config, 16, 8)
    machine = EmulatedMachine(shape, reversed_order=True)
    kernels, experts = load("auto", "auto"), gpu_cases.family(**EXPERTS).config
    pairs = [*operator_pairs(machine, shape, kernels), *expert_pairs(machine, shape, kernels, experts)]
    pairs += window_pairs(machine, shape, kernels)
    assert len(pairs) > 50
    assert {pair.name: pair.differing for pair in pairs if pair.differing} == {}
    assert sum(pair.name.startswith("experts") for pair in pairs) == 6
    in_whole_steps, of_ranks = {"embed", "scores_4", "weigh_4"}, {"take_columns", "complete_tree"}
    assert set(FIELDS) - set(machine.launched) == in_whole_steps | of_ranks


def test_linear_has_the_bits_of_the_twin():
    shape = shape_of(gpu_cases.tiny().config, 16, 0)
    ops = Operators(EmulatedMachine(shape), shape, load("auto", "auto"))
    for rows in (1, 3, 20):
        x, weight = hashed((rows, 80), 1, "wide"), hashed((24, 80), 2, "wide")
        pair = ops.linear("linear", x, weight, 32)
        expected = twin.linear(x, weight, 32)
        assert np.array_equal(pair.gpu.view(np.int32), expected.view(np.int32))


EXPERTS = {"num_experts": 9, "num_experts_per_tok": 3, "moe_intermediate_size": 80}

# What a careless change would do to the source, and the operator that has to notice.
FAULTS = {
    "flush to zero": (
        "return __fmaf_rn(a, b, c);",
        "float r = __fmaf_rn(a, b, c); return r < 1.2e-38f && r > -1.2e-38f ? 0.0f : r;",
    ),
    "another order of lanes": ("for (int half = 8; half; half >>= 1) a", "for (int half = 1; half < 16; half <<= 1) a"),
    "a root that one thread alone sees": (
        "  const float r = x[HIDDEN];",
        "  const float r = threadIdx.x == 0 ? x[HIDDEN] : x[HIDDEN + 1];",
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_the_start_up_check_finds(fault, monkeypatch):
    old, new = FAULTS[fault]
    text = source.read_source()
    assert old in text
    monkeypatch.setattr(emulated, "read_source", lambda: text.replace(old, new))
    with pytest.raises(GpuError, match=r"self-check: .* differs from the CPU's kernels in"):
        check_arithmetic(gpu_cases.emulated(gpu_cases.tiny()))


def test_the_start_up_checks_find_a_window_too_long_and_experts_by_descending_id(monkeypatch):
    changes = {
        "length - a.window : 0;": "length - a.window - 1 : 0;",
        "(p[j] == p[i] && j < i)": "(p[j] == p[i] && j > i)",
    }
    text = source.read_source()
    for old, new in changes.items():
        assert old in text
        text = text.replace(old, new)
    monkeypatch.setattr(emulated, "read_source", lambda: text)
    model, kernels = gpu_cases.family(**EXPERTS).config, load("auto", "auto")
    machine = EmulatedMachine(shape := shape_of(model, 16, 0))
    assert next(window_pairs(machine, shape, kernels)).differing
    assert next(expert_pairs(machine, shape, kernels, model)).differing


def test_the_start_up_check_finds_a_wrong_fused_step(monkeypatch):
    text = source.read_source()
    old = "x[i / width * PADDED + i % width] = swiglu(gate[n], up[n]);"
    assert old in text
    monkeypatch.setattr(emulated, "read_source", lambda: text.replace(old, old.replace("gate[n], up", "up[n], gate")))
    with pytest.raises(GpuError, match="self-check: fused decode of 1 rows"):
        check_arithmetic(gpu_cases.emulated(gpu_cases.tiny()))


def test_the_start_up_check_passes_on_the_kernels_as_they_are():
    check_arithmetic(gpu_cases.emulated(gpu_cases.tiny()))


def test_the_start_up_check_runs_every_kernel_of_resident_decode_and_finds_a_wrong_one(monkeypatch):
    def check() -> set[str]:
        gpu = gpu_cases.emulated(gpu_cases.tiny())
        gpu.use_resident = True
        check_fused(gpu)
        return {name for name in gpu.machine.launched if name.startswith("decode_resident_")}

    assert check() == {name for name in FUSED_FIELDS if name.startswith("decode_resident_")}
    text, old = source.read_source(), "word_of(divide(output, sum), epoch)"
    assert text.count(old) == 2  # the first is that of one row
    monkeypatch.setattr(emulated, "read_source", lambda: text.replace(old, "word_of(divide(sum, output), epoch)", 1))
    with pytest.raises(GpuError, match="self-check: fused decode of 1 rows from position 264 on"):
        check()


def test_data_of_the_start_up_check_that_give_a_nan_are_refused(monkeypatch):
    nothing = np.full(4, np.nan, np.float32)
    monkeypatch.setattr(selfcheck, "operator_pairs", lambda *_: [Pair(name="sum", gpu=nothing, cpu=nothing)])
    with pytest.raises(GpuError, match="self-check: sum is NaN on the CPU"):
        check_arithmetic(gpu_cases.emulated(gpu_cases.tiny()))


def test_experts_on_all_kinds_of_data_have_the_bits_of_the_cpu_and_no_nan():
    model = gpu_cases.family(**EXPERTS).config
    pairs = list(expert_pairs(EmulatedMachine(shape := shape_of(model, 16, 0)), shape, load("auto", "auto"), model))
    assert len(pairs) == 6
    for pair in pairs:
        assert pair.differing == 0, pair.name
        assert not np.isnan(pair.cpu).any(), pair.name


def test_missing_and_unknown_arguments_are_named():
    with pytest.raises(ValueError, match=r"kernel pack: missing or unknown arguments K, columns"):
        pack_arguments("pack", {"weight": 0, "out": 0, "N": 1, "columns": 1, "padded": 1})
    assert not set(FIELDS) & set(FUSED_FIELDS)
