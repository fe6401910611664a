"""The GPU kernels, run by the host emulation, against the CPU kernels and the twin: whole forward passes."""

from __future__ import annotations

from dataclasses import replace

import gpu_cases
import numpy as np
import pytest

from engines.bundled import twin
from engines.bundled.arithmetic import open_arithmetic
from engines.bundled.config import RopeScaling
from engines.bundled.errors import NotSupported
from engines.bundled.gpu import device_index, fused, resident
from engines.bundled.gpu.interface import GpuMemoryError
from engines.bundled.gpu.memory import KV_FRACTION, page_bytes, pages_in
from engines.bundled.gpu.operators import check_shape


def differing(a, b):
    assert a.shape == b.shape
    return int(np.count_nonzero(a.view(np.int32) != b.view(np.int32)))


@pytest.mark.parametrize(("cluster", "reversed_order"), [(8, False), (4, True), (0, False)])
def test_every_step_of_a_script_has_the_bits_of_the_cpu(cluster, reversed_order):
    model = gpu_cases.tiny()
    cpu = open_arithmetic(model, gpu_cases.config())
    gpu = gpu_cases.emulated(model, cluster=cluster, reversed_order=reversed_order)
    compared = 0
    for i, step in enumerate(gpu_cases.script()):
        expected, found = cpu.forward(step), gpu.forward(step)
        assert differing(expected, found) == 0, f"step {i}"
        compared += found.size
    assert compared == 512 * 22
    assert (gpu.fused_steps >= 5) == (cluster > 0)
    assert gpu.graph_steps == gpu.steps


@pytest.mark.parametrize(("cluster", "reversed_order"), [(8, False), (4, True)])
def test_resident_steps_have_the_bits_of_the_cpu(cluster, reversed_order):
    """All layers of a decode step in one launch whose blocks run together: near keys, two chunks of keys, biases."""
    for model in (gpu_cases.tiny(), gpu_cases.family(qkv_bias=True, architecture="Qwen2ForCausalLM")):
        cpu = open_arithmetic(model, gpu_cases.config())
        gpu = gpu_cases.emulated(model, cluster=cluster, reversed_order=reversed_order)
        assert gpu.has_resident
        gpu.use_resident = True
        for i, step in enumerate(gpu_cases.resident_script()):
            assert differing(cpu.forward(step), gpu.forward(step)) == 0, f"step {i}"
        launched = [name for name in gpu.machine.launched if "resident" in name]
        assert launched == ["decode_resident_near"] * 5 + ["decode_resident_far"] * 3


@pytest.mark.parametrize(("cluster", "reversed_order"), [(8, False), (4, True)])
def test_resident_steps_of_several_rows_have_the_bits_of_the_cpu(cluster, reversed_order):
    model = gpu_cases.family(qkv_bias=True, architecture="Qwen2ForCausalLM")
    cpu = open_arithmetic(model, gpu_cases.config())
    gpu = gpu_cases.emulated(model, cluster=cluster, reversed_order=reversed_order)
    gpu.use_resident = True
    for i, step in enumerate(gpu_cases.rows_script(cluster)):
        assert differing(cpu.forward(step), gpu.forward(step)) == 0, f"step {i}"
    launched = [name.removeprefix("decode_resident_") for name in gpu.machine.launched if "resident" in name]
    assert launched == ["near", "2", "4", "4", "4"]


def test_resident_steps_need_room_for_all_their_blocks():
    gpu = gpu_cases.emulated(gpu_cases.tiny())
    blocks = resident.probe(gpu.shape).grid[0]

    class Small:
        def clusters_that_fit(self, launch):
            return blocks // gpu.shape.cluster - 1

    assert resident.fits(gpu.machine, gpu.shape, 2)
    assert not resident.fits(Small(), gpu.shape, 2)
    assert not resident.fits(gpu.machine, gpu.shape, 1)
    assert not resident.fits(gpu.machine, replace(gpu.shape, cluster=0), 2)
    assert not resident.fits(gpu.machine, replace(gpu.shape, cluster=16), 2)  # eight of them would have no columns


FAMILIES = {
    "biases": ({"qkv_bias": True, "architecture": "Qwen2ForCausalLM"}, 8),
    "head norms": ({"qk_norm": True, "architecture": "Qwen3ForCausalLM"}, 8),
    "head norms, separate kernels": ({"qk_norm": True, "architecture": "Qwen3ForCausalLM"}, 0),
    "rope": ({"rope_scaling": RopeScaling(kind="linear", factor=4.0)}, 8),
    "a window beyond the context": ({"windows": (1024, 0), "architecture": "MistralForCausalLM"}, 8),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_has_the_bits_of_the_cpu(name):
    changes, cluster = FAMILIES[name]
    model = gpu_cases.family(**changes)
    cpu, gpu = open_arithmetic(model, gpu_cases.config()), gpu_cases.emulated(model, cluster=cluster)
    plain = gpu_cases.emulated(gpu_cases.family(), cluster=cluster)
    steps = gpu_cases.script()[:5]
    for step in steps:
        assert differing(cpu.forward(step), gpu.forward(step)) == 0
    assert (gpu.fused_steps > 0) == (cluster > 0 and "norms" not in name)
    plain.forward(steps[0])
    assert differing(plain.forward(steps[1]), gpu.forward(steps[1])) > 0 or "window" in name


EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 80}
WINDOWS_AND_EXPERTS = {
    "a window and none": ({"windows": (30, 0)}, 8),
    "windows of one token and of many, in reversed threads": ({"windows": (1, 200)}, 0),
    "experts": ({**EXPERTS, "qk_norm": True}, 8),
    "a layer of experts and one without, in a window": ({**EXPERTS, "dense_layers": (0,), "windows": (0, 20)}, 0),
}


@pytest.mark.parametrize("name", WINDOWS_AND_EXPERTS)
def test_windows_and_experts_have_the_bits_of_the_cpu_and_the_twin(name):
    changes, cluster = WINDOWS_AND_EXPERTS[name]
    model = gpu_cases.family(**changes)
    cpu = open_arithmetic(model, gpu_cases.config())
    gpu = gpu_cases.emulated(model, cluster=cluster, reversed_order=cluster == 0)
    differ = 0
    plain = gpu_cases.emulated(gpu_cases.family(**{**changes, "windows": ()}), cluster=0)
    for step in gpu_cases.script():
        logits = gpu.forward(step)
        assert differing(cpu.forward(step), logits) == 0
        differ += differing(plain.forward(step), logits)
    assert (differ > 0) == ("windows" in changes)
    assert (gpu.fused_steps > 0) == (name == "a window and none")  # as long as it holds all keys
    ids = gpu_cases.tokens(7, 40)
    step = gpu_cases.batch(ids, [0] * 40, list(range(40)), list(range(40)), [[3, 9, 1]])
    assert differing(twin.forward(model, ids), gpu.forward(step)) == 0


def test_free_differs_by_batch_with_experts_too():
    gpu, pages = gpu_cases.emulated(gpu_cases.family(**EXPERTS), "free"), [[i] for i in range(8)]
    alone = gpu.forward(gpu_cases.batch([5], [0], [0], [0], pages))
    together = gpu.forward(gpu_cases.batch([*range(5, 13)], [*range(8)], [0] * 8, [*range(8)], pages))
    assert differing(alone, together[:1]) > 0


def test_keys_before_a_window_may_be_anything():
    """Pages whose tokens have left the window are not read as numbers, NaN included."""
    model = gpu_cases.family(windows=(20, 20))
    results = []
    for spoilt in (False, True):
        gpu = gpu_cases.emulated(model, cluster=0)
        ids = gpu_cases.tokens(7, 60)
        gpu.forward(gpu_cases.batch(ids, [0] * 60, list(range(60)), [59], [[3, 9, 1, 4]]))
        if spoilt:
            page = np.full(16 * 2 * 16, np.nan, np.float32)
            for layer in gpu.weights.layers:
                gpu.machine.upload(layer.keys + 3 * page.nbytes, page)
                gpu.machine.upload(layer.values + 3 * page.nbytes, page)
        results.append(gpu.forward(gpu_cases.batch([5], [0], [60], [0], [[3, 9, 1, 4]])))
    assert differing(*results) == 0
    assert np.isfinite(results[0]).all()


def test_a_prompt_has_the_bits_of_the_twin():
    model = gpu_cases.tiny()
    ids = gpu_cases.tokens(7, 9)
    step = gpu_cases.batch(ids, [0] * 9, list(range(9)), list(range(9)), [[3]])
    assert differing(twin.forward(model, ids), gpu_cases.emulated(model).forward(step)) == 0


@pytest.mark.parametrize("use_resident", [False, True])
def test_subnormal_activations_keep_their_bits(use_resident):
    model = gpu_cases.tiny()
    name = "model.embed_tokens.weight"
    table = model.weights[name]
    tensors = {**model.weights, name: table * np.float32(2.0**-130), "lm_head.weight": table}
    small = replace(model, config=replace(model.config, tie_word_embeddings=False), weights=tensors)
    assert np.any(small.weights[name] != 0)
    assert np.all(np.abs(small.weights[name]) < 2.0**-126)
    cpu, gpu = open_arithmetic(small, gpu_cases.config()), gpu_cases.emulated(small)
    gpu.use_resident = use_resident
    for step in gpu_cases.script()[:4]:
        expected = cpu.forward(step)
        assert np.all(np.abs(expected) < 2.0**-100)
        assert np.any(expected != 0)
        assert differing(expected, gpu.forward(step)) == 0


def test_log_softmax_is_the_definition():
    gpu = gpu_cases.emulated(gpu_cases.tiny())
    logits = gpu.forward(gpu_cases.script()[0])
    assert differing(twin.log_softmax(logits), gpu.log_softmax(logits)) == 0


def test_free_differs_alone_from_in_a_batch():
    gpu = gpu_cases.emulated(gpu_cases.tiny(), "free")
    pages = [[0], [1], [2], [3]]
    alone = gpu.forward(gpu_cases.batch([5], [0], [0], [0], pages))
    together = gpu.forward(gpu_cases.batch([5, 6, 7, 8], [0, 1, 2, 3], [0] * 4, [0, 1, 2, 3], pages))
    assert differing(alone, together[:1]) > 0
    assert gpu.definition == 0


def test_portable_does_not_differ_alone_from_in_a_batch():
    gpu = gpu_cases.emulated(gpu_cases.tiny())
    pages = [[0], [1], [2], [3]]
    alone = gpu.forward(gpu_cases.batch([5], [0], [0], [0], pages))
    together = gpu.forward(gpu_cases.batch([5, 6, 7, 8], [0, 1, 2, 3], [0] * 4, [0, 1, 2, 3], pages))
    assert differing(alone, together[:1]) == 0


def test_facts_name_device_compiler_and_order():
    facts = gpu_cases.emulated(gpu_cases.tiny()).describe()
    assert facts["device"] == "cuda"
    assert (facts["chunk_width"], facts["key_chunk"], facts["kv_fraction"]) == (32, 256, KV_FRACTION)
    assert facts["gpu"] == "emulated on the host"


def test_out_of_memory_says_how_much_and_what_to_do():
    with pytest.raises(GpuMemoryError, match=r"out of memory: .* asked for and .* are free; lower num_pages"):
        gpu_cases.emulated(gpu_cases.tiny(), memory=1 << 20)


def test_buffers_that_grow_give_the_old_ones_back():
    gpu = gpu_cases.emulated(gpu_cases.tiny())
    pages = [list(range(32))]
    for count in (10, 100, 10, 100, 300):
        step = gpu_cases.batch(gpu_cases.tokens(1, count), [0] * count, list(range(count)), [0], pages)
        gpu.forward(step)
    before = gpu.machine.free_bytes()
    for _ in range(3):
        gpu.forward(step)
    assert gpu.machine.free_bytes() == before


def test_pages_follow_free_memory_and_the_stated_fraction():
    model = gpu_cases.tiny().config
    each = page_bytes(model, 16)
    assert each == 2 * 2 * 2 * 16 * 16 * 4
    assert pages_in(each * 1000, model, 16, 0.8) == 800
    with pytest.raises(GpuMemoryError, match=r"one context of 8192 tokens needs"):
        pages_in(each * 100, model, 16)


def test_shapes_the_kernels_are_not_written_for_are_refused_by_name():
    shape = gpu_cases.emulated(gpu_cases.tiny()).shape
    with pytest.raises(NotSupported, match="hidden size 60 is no multiple of 16; head size 20"):
        check_shape(replace(shape, hidden=60, dim=20))


def test_a_step_is_fused_only_when_each_token_is_the_newest_of_its_own_sequence():
    gpu = gpu_cases.emulated(gpu_cases.tiny())
    gpu.forward(gpu_cases.batch([1, 2], [0, 0], [0, 1], [1], [[0]]))
    assert (gpu.steps, gpu.fused_steps) == (1, 0)
    gpu.forward(gpu_cases.batch([3], [0], [2], [0], [[0]]))
    assert (gpu.steps, gpu.fused_steps) == (2, 1)


def test_fused_decode_is_offered_for_smollm2_and_not_for_wide_chunks():
    shape = gpu_cases.emulated(gpu_cases.tiny()).shape
    smollm2 = replace(shape, hidden=576, inner=1536, heads=9, kv_heads=3, dim=64, width=192)
    assert fused.shape_fits(smollm2, 16)
    assert fused.shape_fits(smollm2, 8)
    assert not fused.shape_fits(replace(shape, hidden=4096, inner=12288, heads=32, kv_heads=8, dim=128, width=512), 16)


@pytest.mark.parametrize("device", ["cpu", "cuda:x", "gpu", "cuda:-1"])
def test_device_names_are_checked(device):
    with pytest.raises(ValueError, match="expected cuda or cuda:N"):
        device_index(device)
