"""Where a layer of resident decode spends its cycles: the kernel's stage marks turned into clock reads.

Run by gpu_portable.py. The product's kernels have no clock reads: this module compiles a text of its own, in which each
line `// stage N: name` of kernels/resident.cu is a store of the multiprocessor's clock.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from engines.bundled.gpu import nvrtc, source
from engines.bundled.gpu.cuda import CudaMachine
from engines.bundled.gpu.interface import Launch, Shape

STAGES, LAYERS, BLOCKS = 9, 64, 256
MARK = re.compile(r"// stage (\d): .*")
CLOCK = f"""
extern "C" {{ __device__ long long stage_clock[{BLOCKS * LAYERS * STAGES}]; }}
DEVICE void stamp(int layer, int stage) {{
  if (threadIdx.x == 0) stage_clock[(blockIdx.x * {LAYERS} + layer) * {STAGES} + stage] = clock64();
}}
"""


def marked_source() -> str:
    """The kernels with clock reads at the marks of resident.cu."""
    text = source.read_source()
    begin = text.index('#line 1 "resident.cu"')
    start = text.index("#if FUSED && LINKED", begin) + len("#if FUSED && LINKED")
    return text[:start] + CLOCK + MARK.sub(r"stamp(i, \1);", text[start:])


@contextmanager
def marked_kernels() -> Iterator[None]:
    """Kernels compiled inside have clock reads."""
    before = nvrtc.read_source
    nvrtc.read_source = marked_source
    try:
        yield
    finally:
        nvrtc.read_source = before


def stage_cycles(machine: CudaMachine, launch: Launch, shape: Shape, layers: int) -> dict[str, dict[str, float]]:
    """Mean cycles between neighbouring marks over all layers but the first two and the last, by kind of block."""
    recording = machine.record([launch])
    for _ in range(5):
        recording.replay()
    machine.synchronize()
    address, size = ctypes.c_uint64(), ctypes.c_size_t()
    call = machine.driver.call
    call("cuModuleGetGlobal_v2", ctypes.byref(address), ctypes.byref(size), machine.module, b"stage_clock")
    clocks = np.zeros(2 * BLOCKS * LAYERS * STAGES, np.int32)
    machine.download(address.value, clocks)
    recording.close()
    found = clocks.view(np.int64).reshape(BLOCKS, LAYERS, STAGES)[: launch.grid[0], :layers]
    names = dict(re.findall(r"// stage (\d): (.*)", source.read_source()))
    heads = shape.kv_heads * shape.cluster
    kinds = {"attention": found[:heads], "mlp": found[heads:]}
    return {kind: _means(stamps, names) for kind, stamps in kinds.items()}


def _means(stamps: np.ndarray, names: dict[str, str]) -> dict[str, float]:
    chosen = stamps[:, 2:-1].astype(np.float64)
    steps = np.diff(chosen, axis=2).mean(axis=(0, 1))
    whole = np.diff(stamps[:, 2:, 0].astype(np.float64), axis=1).mean()
    table = {f"to {names[str(i + 1)]}": round(float(v)) for i, v in enumerate(steps)}
    return {**table, "layer": round(float(whole))}
