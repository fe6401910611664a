"""On a GPU: the same bits as the CPU. Without one: UNSUPPORTED, and the reason is what is checked."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import gpu_cases
import numpy as np
import pytest
from resized_model import resized

from engines.bundled.arithmetic import open_arithmetic
from engines.bundled.errors import NotSupported
from engines.bundled.gpu import driver as cu
from engines.bundled.gpu import open_gpu_arithmetic, operators, why_not
from engines.bundled.gpu.cuda import CudaMachine
from engines.bundled.gpu.ledger import kernels_launched
from engines.bundled.gpu.nvrtc import forbidden_instructions
from engines.bundled.parallel.ranks import open_parallel

ARITHMETICS = ("portable", "free", "native")


@pytest.mark.parametrize("arithmetic", ARITHMETICS)
def test_a_gpu_gives_the_bits_or_the_reason_why_there_is_none(arithmetic):
    model, settings = gpu_cases.tiny(), gpu_cases.config(arithmetic)
    reason = why_not()
    if reason is not None:
        with pytest.raises(NotSupported, match=r"device=cuda"):
            open_gpu_arithmetic(model, settings, "cuda")
        assert "driver" in reason or "NVRTC" in reason or "device" in reason
        return
    gpu, cpu = open_gpu_arithmetic(model, settings, "cuda"), open_arithmetic(model, settings)
    for step in gpu_cases.script():
        expected, found = cpu.forward(step), gpu.forward(step)
        if arithmetic == "portable":
            assert np.array_equal(expected.view(np.int32), found.view(np.int32))
        else:
            assert np.allclose(expected, found, atol=1e-3)


def count(gpu, *, use_graphs):
    """Kernels that the script's steps run."""
    gpu.use_graphs, before = use_graphs, kernels_launched()
    for step in gpu_cases.script():
        gpu.forward(step)
    return kernels_launched() - before


@pytest.mark.parametrize("device", ["cuda", "emulated"])
def test_replayed_kernels_are_counted_and_logits_say_where_they_lay(device):
    model, settings = gpu_cases.tiny(), gpu_cases.config()
    if device == "cuda" and why_not() is not None:
        with pytest.raises(NotSupported, match=r"device=cuda"):
            open_gpu_arithmetic(model, settings, device)
        return
    gpu = open_gpu_arithmetic(model, settings, device) if device == "cuda" else gpu_cases.emulated(model)
    one_by_one = count(gpu, use_graphs=False)
    assert count(gpu, use_graphs=True) == count(gpu, use_graphs=True) == one_by_one > 0
    assert gpu.graph_steps > 0
    assert gpu.describe()["logits_device"] == {"cuda": "cuda:0"}.get(device, device)


class StubDriver:
    """Accepts every call; says of an address what it was told."""

    def __init__(self):
        self.said = {}  # pointer attribute to value; others are refused

    def call(self, name, *arguments):
        assert self.try_call(name, *arguments) == 0

    def try_call(self, name, *arguments):
        if name != "cuPointerGetAttribute":
            return 0
        where, attribute, _ = arguments
        if attribute not in self.said:
            return 1
        where._obj.value = self.said[attribute]
        return 0


@pytest.fixture
def machine():
    machine = object.__new__(CudaMachine)
    machine.driver, machine.linked, machine.stream, machine.recordings = StubDriver(), True, cu.Pointer(), []
    machine._functions = defaultdict(cu.Pointer)
    return machine


def test_a_graph_counts_its_kernels_when_it_runs_and_not_when_it_is_recorded(machine):
    launch, before = operators.embed(256, 512, 768, 3), kernels_launched()
    recording = machine.record([launch, launch])
    assert kernels_launched() - before == 0
    recording.replay()
    recording.replay()
    machine.launch(launch)
    assert kernels_launched() - before == 5


@pytest.mark.parametrize(
    ("said", "device"),
    [
        ({cu.MEMORY_TYPE: cu.DEVICE_MEMORY, cu.DEVICE_ORDINAL: 1}, "cuda:1"),
        ({cu.MEMORY_TYPE: 1, cu.DEVICE_ORDINAL: 0}, None),  # the host's, known to the driver
        ({}, None),
    ],
)
def test_the_driver_says_where_an_address_lies(machine, said, device):
    machine.driver.said = said
    assert machine.device_of(256) == device


FAMILIES = {
    "biases": {"qkv_bias": True, "architecture": "Qwen2ForCausalLM"},
    "head norms": {"qk_norm": True, "architecture": "Qwen3ForCausalLM"},
    "windows": {"windows": (30, 200), "architecture": "MistralForCausalLM"},
    "experts": {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 80, "qk_norm": True},
}


@pytest.mark.parametrize("name", FAMILIES)
def test_families_have_the_bits_of_the_cpu_on_a_gpu(name):
    model, settings = gpu_cases.family(**FAMILIES[name]), gpu_cases.config()
    if why_not() is not None:
        with pytest.raises(NotSupported, match=r"device=cuda"):
            open_gpu_arithmetic(model, settings, "cuda")
        return
    gpu, cpu = open_gpu_arithmetic(model, settings, "cuda"), open_arithmetic(model, settings)
    for step in gpu_cases.script():
        assert np.array_equal(cpu.forward(step).view(np.int32), gpu.forward(step).view(np.int32))


def test_tensorcore_in_windows_passes_its_own_checks_or_says_what_is_missing():
    model = gpu_cases.family(windows=(30, 200), architecture="MistralForCausalLM")
    settings = replace(gpu_cases.config("tensorcore"), dtype="bfloat16")
    if why_not() is not None:
        with pytest.raises(NotSupported, match="dtype=bfloat16"):
            open_gpu_arithmetic(model, settings, "cuda")
        return
    gpu = open_gpu_arithmetic(model, settings, "cuda")  # a prompt of 300 tokens, whole and in pieces
    native = open_gpu_arithmetic(model, replace(settings, arithmetic="native"), "cuda")
    for step in gpu_cases.script()[:7]:
        expected, found = native.forward(step), gpu.forward(step)
        assert np.abs(expected - found).max() < 0.1 * np.abs(expected).max()


def test_ranks_by_the_tree_give_the_bits_of_one_process_or_say_what_is_missing():
    model = resized(num_attention_heads=6, num_key_value_heads=3)
    settings = replace(gpu_cases.config("tensorcore"), dtype="bfloat16", k_order="tree")
    if why_not() is not None:
        with pytest.raises(NotSupported, match="dtype=bfloat16"):
            open_gpu_arithmetic(model, settings, "cuda")
        return
    from engines.bundled.gpu.tensorcore.parallel import EmulatedRanks

    gpu = open_gpu_arithmetic(model, settings, "cuda")
    ranks = [EmulatedRanks(gpu, count, settings.num_pages) for count in (2, 3, 4)]
    for step in gpu_cases.script():  # those that want no logits fill pages, too
        expected = gpu.logits(step).clone().float().cpu().numpy()
        for emulated in ranks:
            found = emulated.logits(step).float().cpu().numpy()
            assert np.array_equal(expected.view(np.int32), found.view(np.int32))


@pytest.mark.parametrize("collectives", ["gloo", "nccl"])
def test_two_processes_of_tensorcore_give_the_bits_of_one_or_say_what_is_missing(collectives):
    model = gpu_cases.tiny()
    settings = replace(gpu_cases.config("tensorcore"), dtype="bfloat16", k_order="tree")
    shared = replace(settings, tensor_parallel_size=2, collectives=collectives)
    cards = count_cards()
    if cards < (2 if collectives == "nccl" else 1):
        reason = "2 ranks need a GPU each" if collectives == "nccl" else "dtype=bfloat16"
        with pytest.raises(NotSupported, match=reason):
            open_parallel("tiny", model, shared, device="cuda")
        return
    alone, together = open_gpu_arithmetic(model, settings, "cuda"), open_parallel("tiny", model, shared, device="cuda")
    try:
        for step in gpu_cases.script():
            expected, found = alone.forward(step), together.forward(step)
            assert np.array_equal(expected.view(np.int32), found.view(np.int32))
        assert len({count["weight_bytes"] for count in together.counts()}) == 1
    finally:
        together.close()


def count_cards() -> int:
    import torch

    return torch.cuda.device_count()


def test_reports_from_the_device_have_the_bits_of_the_cpu_or_the_reason_why_there_are_none():
    if why_not() is not None:
        with pytest.raises(NotSupported, match="dtype=bfloat16"):
            open_gpu_arithmetic(gpu_cases.tiny(), replace(gpu_cases.config("tensorcore"), dtype="bfloat16"), "cuda")
        return
    import torch

    from engines.bundled.gpu.tensorcore.softmax import summarise
    from engines.bundled.kernels.library import load

    random, kernels = np.random.default_rng(8), load("auto", "auto")
    for count, vocab in ((7, 151936), (2, 49152), (1, 768 * 3 + 1)):
        spread = np.array([0.01, 0.3, 3, 40, 200, 3, 3], np.float32)[:count, None]
        logits = torch.from_numpy(random.normal(0, 1, (count, vocab)).astype(np.float32) * spread).to(torch.bfloat16)
        x, asked = logits.float().numpy(), np.arange(count, dtype=np.int32) * 5
        found = summarise(logits.cuda(), 20, asked, softmax=True)
        ids, logprobs = kernels.top_k(x, 20), kernels.log_softmax(x)
        assert np.array_equal(found.ids, ids)
        assert np.array_equal(found.asked, x[np.arange(count), asked])
        for row in range(count):
            assert np.array_equal(found.logprobs(row, x[row]).view(np.int32), logprobs[row].view(np.int32))


def test_an_arithmetic_of_another_name_is_refused():
    with pytest.raises(ValueError, match="expected portable, free or native on a GPU, got 'exact'"):
        open_gpu_arithmetic(gpu_cases.tiny(), gpu_cases.config("exact"), "cuda")


def test_instructions_that_round_otherwise_are_found_in_compiled_text():
    good = "fma.rn.f32 \t%f1, %f2, %f3, %f4;\n\tdiv.rn.f32 %f1, %f2, %f3;\n\tsqrt.rn.f32 %f1, %f2;"
    assert forbidden_instructions(good) == ()
    bad = good + "\n\tdiv.approx.f32 %f1, %f2, %f3;\n\tadd.ftz.f32 %f1, %f2, %f3;\n\tdiv.full.f32 %f1, %f2, %f3;"
    assert forbidden_instructions(bad) == ("add.ftz.f32", "div.approx.f32", "div.full.f32")
