"""The whole engine over emulated GPU kernels: what requests get is what the CPU gives, and nothing is left behind."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import gpu_cases
import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a folder up, where the engine's tests lie

from engine_cases import evidence, greedy, kernels, request, run_all

from engines.bundled.ahead import Ahead
from engines.bundled.arithmetic import open_arithmetic
from engines.bundled.cache_store import restore_cache, save_cache
from engines.bundled.draft import open_drafter
from engines.bundled.engine import Engine
from engines.bundled.errors import NotSupported
from engines.bundled.fast import open_fast_path
from engines.bundled.gpu import EMULATED, check_dtype, fit_pages, open_gpu_arithmetic
from engines.bundled.gpu.emulated import EmulatedMachine
from engines.bundled.gpu.interface import GpuMemoryError
from engines.bundled.gpu.lone import LoneGpu
from engines.bundled.gpu.memory import EMULATED_BYTES, page_bytes, weight_bytes
from engines.bundled.gpu.portable import shape_of
from engines.bundled.models.tiny import MOE_CONFIG, MOE_NAME, TinySource

MODEL = TinySource().model()
OPTIONS = replace(gpu_cases.config(num_pages=24), draft_length=4)
TURNS = [5, 9, 5, 9, 5, 9, 5, 9, 5, 9]


def open_engine(device: str, model=MODEL, **changes) -> Engine:
    """Without the check at the start, which test_gpu_operators.py holds."""
    config = replace(OPTIONS, **changes)
    if device == "cpu":
        arithmetic = open_arithmetic(model, config)
    else:
        shape = shape_of(model.config, config.page_size, 8)
        arithmetic = LoneGpu(model, config, EmulatedMachine(shape), shape, kernels())
    return Engine(
        model.config, config, arithmetic, kernels(), str, model_digest=model.digest,
        drafter=open_drafter(model, config, kernels()), fast=open_fast_path(model, config, kernels(), arithmetic),
    )  # fmt: skip


def wild(index: int, **changes):
    """A request whose draws are nearly even."""
    sampling = greedy(temperature=1.5 * (index % 3 > 0), seed=index, max_tokens=6 + index, logprobs=5)
    prompt = [*TURNS[index % 5 :], *range(20 * index), index]
    return request(f"r{index}", prompt, sampling, logits_digest=True, **changes)


REQUESTS = [wild(i) for i in range(5)]
ARRIVALS = [0, 0, 1, 4, 6]


@pytest.fixture(scope="module")
def expected():
    return [evidence(sequence) for sequence in run_all(open_engine("cpu"), REQUESTS, ARRIVALS)]


@pytest.mark.parametrize(
    "changes",
    [
        {"max_num_batched_tokens": 16, "num_pages": 10},  # chunks, and too few pages for all
        {"enforce_eager": True, "draft": "lookup"},
        {"async_scheduling": True, "draft": "model"},
        {"rollback": "all", "prefix_cache": True},
    ],
    ids=lambda changes: " ".join(changes),
)
def test_requests_get_the_bits_of_the_cpu(changes, expected):
    engine = open_engine(EMULATED, **changes)
    sequences = run_all(engine, REQUESTS, ARRIVALS)
    assert [evidence(sequence) for sequence in sequences] == expected
    facts = engine.arithmetic.describe()
    assert facts["execution"] == ("launches" if changes.get("enforce_eager") else "recorded graphs")
    assert facts["gpu_graphs"] == ("none" if changes.get("enforce_eager") else "steps of up to 64 tokens")
    if "num_pages" in changes:
        assert sum(sequence.preemptions for sequence in sequences) > 0
    if "async_scheduling" in changes:
        assert isinstance(engine.ahead, Ahead)
    if "rollback" in changes:
        assert sum(sequence.rollbacks for sequence in sequences) > 0


def test_free_differs_for_one_beside_others():
    one = REQUESTS[3]
    alone = evidence(run_all(open_engine(EMULATED, arithmetic="free"), [one])[0])
    together = run_all(open_engine(EMULATED, arithmetic="free"), REQUESTS)
    assert evidence(together[3]) != alone


def test_a_mixture_of_experts_runs_as_on_the_cpu():
    model = TinySource(MOE_NAME, MOE_CONFIG).model()
    found, wanted = (
        [evidence(sequence) for sequence in run_all(open_engine(device, model), REQUESTS[:3])]
        for device in (EMULATED, "cpu")
    )
    assert found == wanted


@pytest.mark.parametrize(("saved_on", "restored_on"), [("cpu", EMULATED), (EMULATED, "cpu")])
def test_a_cache_saved_on_one_device_is_restored_on_the_other(saved_on, restored_on, tmp_path):
    one = request("a", range(1, 60), greedy(max_tokens=5), logits_digest=True)
    first = open_engine(saved_on, prefix_cache=True)
    wanted = evidence(run_all(first, [one])[0])
    assert save_cache(first, tmp_path / "store") == 3
    engine = open_engine(restored_on, prefix_cache=True)
    assert restore_cache(engine, tmp_path / "store") == 3
    (again,) = run_all(engine, [one])
    assert again.cached_tokens == 48
    assert evidence(again) == wanted


def test_a_thousand_requests_leave_no_memory_and_no_page_taken():
    engine = open_engine(EMULATED, gpu_cases.family(num_hidden_layers=1))
    machine = engine.arithmetic.machine
    sampling = greedy(max_tokens=1, logprobs=0)
    run_all(engine, [request(f"w{i}", [i, 1], sampling) for i in range(60)])  # every size of step has been seen
    before, graphs = machine.free_bytes(), len(engine.arithmetic._graphs)
    for turn in range(10):
        run_all(engine, [request(f"{turn} {i}", [i % 500, turn], sampling) for i in range(100)])
    assert machine.free_bytes() == before
    assert engine.scheduler.pages.free == engine.scheduler.pages.count
    assert graphs <= len(engine.arithmetic._graphs) <= 64


def test_keys_and_values_that_do_not_fit_are_one_error_with_both_numbers():
    shape, room = shape_of(MODEL.config, 16, 8), 1 << 27
    config = replace(OPTIONS, num_pages=room // page_bytes(MODEL.config, 16) * 4)  # two layers, keys and values
    message = r"out of memory: 0\.1\d GiB more were asked for and 0\.12 GiB are free; lower num_pages"
    with pytest.raises(GpuMemoryError, match=message):
        LoneGpu(MODEL, config, EmulatedMachine(shape, memory=room), shape, kernels())


def test_the_pool_is_what_was_asked_for_or_a_stated_fraction_of_what_the_weights_leave():
    few = fit_pages(MODEL.config, OPTIONS, EMULATED)
    assert few.num_pages == OPTIONS.num_pages
    left = EMULATED_BYTES - weight_bytes(MODEL.config)
    half = fit_pages(MODEL.config, replace(OPTIONS, kv_fraction=0.5), EMULATED)
    assert half.num_pages == int(left * 0.5) // page_bytes(MODEL.config, 16)
    bfloat16 = fit_pages(MODEL.config, replace(OPTIONS, dtype="bfloat16", kv_fraction=0.5), EMULATED)
    each = page_bytes(MODEL.config, 16, "bfloat16")
    with pytest.raises(NotSupported, match=r"expected 0, or a number below 1, got 1\.5"):
        fit_pages(MODEL.config, replace(OPTIONS, kv_fraction=1.5), EMULATED)
    assert 2 * each == page_bytes(MODEL.config, 16)
    assert bfloat16.num_pages == int((EMULATED_BYTES - weight_bytes(MODEL.config, "bfloat16")) * 0.5) // each


@pytest.mark.parametrize(
    ("changes", "device", "reason"),
    [
        ({"arithmetic": "tensorcore", "dtype": "bfloat16"}, EMULATED, "tensorcore, dtype=bfloat16 needs an NVIDIA GPU"),
        ({"arithmetic": "native"}, EMULATED, "native, dtype=float32 needs an NVIDIA GPU"),
        ({"enforce_eager": True}, "cpu", "a CPU has no recorded graphs"),
        ({"k_order": "tree"}, "cpu", "k_order=tree: float32 sums have one order, that of arithmetic=portable"),
        ({"k_order": "tree"}, EMULATED, "k_order=tree: float32 sums have one order"),
    ],
)
def test_what_a_device_does_not_do_is_refused(changes, device, reason):
    config = replace(OPTIONS, **changes)

    def refuse():
        check_dtype(config, device)
        open_gpu_arithmetic(MODEL, config, device)

    with pytest.raises(NotSupported, match=reason):
        refuse()


def test_the_emulated_device_is_opened_by_name_and_checked():
    arithmetic = open_gpu_arithmetic(MODEL, OPTIONS, EMULATED)
    assert isinstance(arithmetic, LoneGpu)
    assert arithmetic.use_fused
    assert arithmetic.describe()["gpu"] == "emulated on the host"
    assert arithmetic.steps > 0


def test_pages_read_as_the_cpu_has_them():
    cpu, gpu = open_engine("cpu"), open_engine(EMULATED)
    for engine in (cpu, gpu):
        run_all(engine, REQUESTS[:1])
    for mine, theirs in zip(gpu.arithmetic.pages, cpu.arithmetic.pages, strict=True):
        assert mine.keys.shape == theirs.keys.shape
        assert mine.values.shape == theirs.values.shape
        tokens = len(REQUESTS[0].prompt)
        assert np.array_equal(mine.keys[[0]][..., :tokens], theirs.keys[[0]][..., :tokens])
        assert np.array_equal(mine.values[[0]][:, :, :tokens], theirs.values[[0]][:, :, :tokens])
