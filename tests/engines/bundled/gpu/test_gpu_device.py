"""On a GPU: the same bits as the CPU. Without one: UNSUPPORTED, and the reason is what is checked."""

from __future__ import annotations

from dataclasses import replace

import gpu_cases
import numpy as np
import pytest
from resized_model import resized

from engines.bundled.arithmetic import open_arithmetic
from engines.bundled.errors import NotSupported
from engines.bundled.gpu import open_gpu_arithmetic, why_not
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
