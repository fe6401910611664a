"""What `tensorcore` refuses and why, how it chooses a way to multiply, and what its kernels compile to; no GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from matrix_unit import VARIABLE, import_interpreted
from presence import missing

try:
    import_interpreted()
except ImportError:
    missing("triton", "Triton is not installed; the extra `test` brings it on Linux", module=True)

import torch

from engines.bundled.batch import StepBatch
from engines.bundled.config import EngineConfig
from engines.bundled.errors import NotSupported
from engines.bundled.gpu import check_dtype, open_gpu_arithmetic
from engines.bundled.gpu.tensorcore.pages import TorchPages
from engines.bundled.models.tiny import TinySource
from engines.bundled_adapter import SPLIT_K_OFF, BundledAdapter
from harness.choose import choose_plan

MODEL = TinySource().model()
CONFIG = EngineConfig(
    arithmetic="tensorcore", max_num_seqs=8, max_num_batched_tokens=64, page_size=8, num_pages=16, threads=1,
    isa="auto", compiler="auto", tuning=0, dtype="bfloat16",
)  # fmt: skip


@pytest.fixture(autouse=True)
def interpreter(monkeypatch):
    monkeypatch.setenv(VARIABLE, "1")


@pytest.mark.parametrize(
    ("changes", "device", "reason"),
    [
        ({}, "cpu", "bfloat16 runs on an NVIDIA GPU alone; set device=cuda"),
        ({"arithmetic": "portable"}, "cpu", "bfloat16 runs on an NVIDIA GPU alone"),
        ({"arithmetic": "portable"}, "cuda", "portable is defined in float32"),
        ({"dtype": "float32"}, "cuda", "tensorcore computes in bfloat16; set dtype=bfloat16"),
        ({}, "cuda", "sees 0 GPUs"),
    ],
)  # fmt: skip
def test_what_cannot_run_is_refused_with_the_reason(monkeypatch, changes, device, reason):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    config = replace(CONFIG, **changes)
    refuse = check_dtype if device == "cpu" else lambda *given: open_gpu_arithmetic(MODEL, *given)
    with pytest.raises(NotSupported, match=reason):
        refuse(config, device)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"head_dim": 8}, "a head dimension of 8"),
        ({"num_attention_heads": 40}, "more than 16 query heads"),
    ],
)
def test_models_the_kernels_are_not_for_are_refused(changes, reason):
    from engines.bundled.gpu.tensorcore.weights import check_family

    with pytest.raises(NotSupported, match=reason):
        check_family(replace(MODEL.config, **changes), CONFIG)


def test_a_mixture_of_experts_is_not_summed_by_the_tree_and_other_orders_are_unknown():
    from engines.bundled.gpu.tensorcore.weights import check_family

    experts = replace(MODEL.config, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=48)
    with pytest.raises(NotSupported, match="k_order=tree: a mixture of experts"):
        check_family(experts, replace(CONFIG, k_order="tree"))
    check_family(experts, replace(CONFIG, k_order="tree", arithmetic="free"))  # the control has an order of its own
    with pytest.raises(ValueError, match="k_order: expected one of chain, tree, got 'any'"):
        check_family(MODEL.config, replace(CONFIG, k_order="any"))


def test_the_mode_sets_device_and_dtype_and_the_process_variables():
    adapter = BundledAdapter()
    settings = adapter.modes()["tensorcore"]
    assert settings == {"arithmetic": "tensorcore", "device": "cuda", "dtype": "bfloat16"}
    assert adapter.environment(settings).items() >= SPLIT_K_OFF.items()
    assert not SPLIT_K_OFF.keys() & adapter.environment({"arithmetic": "native", "device": "cuda"}).keys()
    plan = choose_plan(["quick"], engine="bundled", model="tiny", mode="tensorcore", assignments=())
    settings = [dict(case.lifetime.settings) for case in plan.cases.values()]
    controls = [one for one in settings if one["arithmetic"] == "free"]
    assert controls
    assert all((one["device"], one["dtype"]) == ("cuda", "bfloat16") for one in controls)


def weights():
    from engines.bundled.gpu.tensorcore.weights import from_model, load_weights

    return load_weights(replace(MODEL.config, num_hidden_layers=1, vocab_size=512), from_model(MODEL, "cpu"))


def cheap(monkeypatch) -> None:
    """A self-test of few rows and shapes, by a reference that costs little here."""
    from engines.bundled.gpu.tensorcore import linear, selftest

    made = weights()
    monkeypatch.setattr(selftest, "matrices", lambda *_: [(made.layers[0].attention_out[:16], 2)])
    monkeypatch.setattr(selftest, "multiply", lambda x, weight, _: torch.mm(x, weight.t()))
    monkeypatch.setattr(linear, "multiply", lambda x, weight, _: torch.mm(x, weight.t()))


def test_a_way_to_multiply_that_differs_is_refused_and_named(monkeypatch):
    from engines.bundled.gpu.tensorcore import selftest
    from engines.bundled.gpu.tensorcore.linear import CublasLt

    cheap(monkeypatch)
    for name, value in selftest.ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    linear, facts = selftest.choose_linear(None, tokens=2, seats=2)
    assert (linear.name, facts["gpu_linear"]) == (CublasLt.name, CublasLt.name)
    assert facts["gpu_linear_test"] == "equal in 1 shapes, 2 products, 48 elements"

    def last_bit(self, x, weight):
        return (torch.mm(x, weight.t()).view(torch.int16) ^ (len(x) == 2)).view(x.dtype)

    monkeypatch.setattr(CublasLt, "__call__", last_bit)
    linear, facts = selftest.choose_linear(None, tokens=2, seats=2)
    assert linear.name == "tiles by rows"
    assert "cuBLASLt without split-K refused: 32 of 32 elements differ at 2 rows of 16x64" in facts["gpu_linear_test"]


def test_without_the_variables_cublaslt_is_not_tried(monkeypatch):
    from engines.bundled.gpu.tensorcore import selftest
    from engines.bundled.gpu.tensorcore.linear import Tiled

    cheap(monkeypatch)
    monkeypatch.delenv("CUBLASLT_WORKSPACE_SIZE", raising=False)
    assert selftest.ENVIRONMENT == SPLIT_K_OFF
    _, facts = selftest.choose_linear(None, tokens=2, seats=2)
    assert facts["gpu_linear"] == "tiles by rows"
    assert "CUBLASLT_WORKSPACE_SIZE" in facts["gpu_linear_test"]
    monkeypatch.setattr(Tiled, "__call__", lambda self, x, weight: torch.zeros(len(x), len(weight), dtype=x.dtype))
    linear, facts = selftest.choose_linear(None, tokens=2, seats=2)
    assert facts["gpu_linear"] == linear.name == "one tile"


def normal(*shape: int):
    return torch.randn(shape).to(torch.bfloat16)


def test_cublaslt_is_asked_for_tested_numbers_of_rows_alone(monkeypatch):
    from engines.bundled.gpu.tensorcore.linear import CublasLt, row_sizes

    sizes = row_sizes(1000)
    assert sizes[-1] == 1024
    assert {CublasLt().padded(rows) for rows in range(1, 1001)} <= set(sizes)
    x, weight = normal(5, 32), normal(8, 32)
    linear = CublasLt()
    asked: list[int] = []
    monkeypatch.setattr(torch, "mm", lambda a, b: asked.append(len(a)) or a.matmul(b))
    assert linear(x, weight).shape == (5, 8)
    assert asked == []  # nothing is trusted yet: our kernel
    linear.trust(weight, 8)
    assert linear(x, weight).shape == (5, 8)
    assert asked == [8]
    assert linear(normal(9, 32), weight).shape == (9, 8)
    assert asked == [8]


def test_padded_arrays_hold_the_step_and_nothing_else():
    from engines.bundled.gpu.tensorcore.layout import cut, join, lay_out_tiles
    from engines.bundled.gpu.tensorcore.operators import Heads

    batch = StepBatch(
        token=np.arange(10, 17, dtype=np.int32), sequence=np.array([0] * 6 + [1], np.int32),
        position=np.array([3, 4, 5, 6, 7, 8, 30], np.int32), page_table=np.array([[2, -1], [4, 5]], np.int32),
        wanted=np.array([5, 6], np.int32),
    )  # fmt: skip
    heads = Heads(heads=32, kv=1, dim=16, page=16)  # four tokens a tile
    parts = lay_out_tiles(batch, heads, tokens=16, pieces=8, pitch=3)
    views = cut([part.size for part in parts], torch.from_numpy(join(parts)))
    token, sequence, position, first, count, owner, wanted, pages = (view.tolist() for view in views)
    assert token == [*range(10, 17), *[0] * 9]
    assert position == [3, 4, 5, 6, 7, 8, 30, *[-1] * 9]
    assert sequence[:7] == [0] * 6 + [1]
    tiles = [one for one in zip(first, count, owner, strict=True) if one[1]]
    assert tiles[:3] == [(0, 4, 0), (4, 2, 0), (6, 1, 1)]
    assert tiles[3:] == [(7, 4, 0), (11, 4, 0), (15, 1, 0)]  # of padding
    assert len(first) == 16 // 4 + 8 + 1
    assert wanted[:2] == [5, 6]
    assert pages[:6] == [2, 0, 0, 4, 5, 0]


@pytest.mark.parametrize(("capability", "matrix"), [(80, "mma"), (90, "wgmma")])
def test_kernels_compile_without_contraction_in_attention(capability, matrix):
    script = Path(__file__).with_name("compile_kernels.py")
    environment = {name: value for name, value in os.environ.items() if name != VARIABLE}
    environment["PYTHONPATH"] = os.pathsep.join(map(str, [Path(__file__).parents[4], *sys.path]))
    done = subprocess.run([sys.executable, script, str(capability)], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert found["linear_kernel"]["matrix"] == matrix
    uncontracted = (
        "decode_merge_kernel", "mix_kernel", "tree_linear_kernel", "tree_sum_kernel",
    )  # fmt: skip
    assert all(found[name]["fma"] == 0 for name in uncontracted)
    assert found["decode_kernel"]["fma"] == 16 * 64 // 128  # one per score and thread, as it is written
    assert found["prefill_kernel"]["fma"] == 128 * 64 // 256
    assert {found[name]["matrix"] for name in ("decode_kernel", "prefill_kernel")} == {"mma", matrix}
    assert found["expert_kernel"]["matrix"] != "none"
    assert found["tree_linear_kernel"]["matrix"] == matrix
    assert [found[name]["fma"] for name in ("chunk_sum_kernel", "log_sum_kernel")] == [48 * 9, 11]  # as written
    assert found["chunk_sum_kernel"]["inexact"] == found["log_sum_kernel"]["inexact"] == 0
    assert all(one["atomics"] == 0 for one in found.values())
    assert found["prefill_kernel"]["shared"] < 100 * 1024


def test_pages_made_in_inference_mode_are_written_and_read_back():
    with torch.inference_mode():
        pool = torch.zeros(4 * 8 + 1, 2, 3, dtype=torch.bfloat16)
    for is_keys in (True, False):
        pages = TorchPages(pool=pool, size=8, is_keys=is_keys)
        content = np.arange(96, dtype=np.float32).reshape(2, *pages.shape[1:])
        pages[[3, 1]] = content
        assert np.array_equal(pages[[1, 3]], content[::-1])
