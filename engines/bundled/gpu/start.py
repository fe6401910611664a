"""Opens the kernels for a model: picks the cluster size, loads, checks, and only then hands the arithmetic out.

It does not compute. Rules: fused decode is used where clusters of a preferred size fit on the card; a check that fails
is NotSupported with what differed, never a silent step to other kernels.
"""

from __future__ import annotations

from engines.bundled.config import EngineConfig, Model
from engines.bundled.errors import NotSupported
from engines.bundled.gpu import CLUSTERS, fused
from engines.bundled.gpu.cuda import CudaMachine
from engines.bundled.gpu.interface import GpuError, GpuMemoryError, Machine, Shape
from engines.bundled.gpu.lone import LoneGpu
from engines.bundled.gpu.portable import shape_of
from engines.bundled.gpu.selfcheck import check_arithmetic
from engines.bundled.kernels.library import load


def start_kernels(model: Model, config: EngineConfig, index: int) -> LoneGpu:
    """`portable` or `free`; see `open_gpu_arithmetic`."""
    try:
        machine, shape = open_machine(model, config, index)
        return _start(model, config, machine, shape)
    except GpuMemoryError:
        raise
    except GpuError as error:
        raise NotSupported(f"device=cuda: {error}") from error


def start_emulated(model: Model, config: EngineConfig) -> LoneGpu:
    """The same over kernels that this host emulates, fused decode included where the shape has one."""
    from engines.bundled.gpu.emulated import EmulatedMachine

    try:
        fits = (c for c in CLUSTERS if fused.shape_fits(shape_of(model.config, config.page_size, c), c))
        cluster = next(fits, 0) if fused.model_fits(model.config) else 0
        shape = shape_of(model.config, config.page_size, cluster)
        return _start(model, config, EmulatedMachine(shape), shape)
    except GpuMemoryError:
        raise
    except GpuError as error:
        raise NotSupported(f"device=emulated: {error}") from error


def _start(model: Model, config: EngineConfig, machine: Machine, shape: Shape) -> LoneGpu:
    arithmetic = LoneGpu(model, config, machine, shape, load(config.isa, config.compiler))
    check_arithmetic(arithmetic)
    return arithmetic


def open_machine(
    model: Model, config: EngineConfig, index: int, clusters: tuple[int, ...] = CLUSTERS
) -> tuple[CudaMachine, Shape]:
    """The device with kernels compiled for this model, and the shape they were compiled for."""
    for cluster in clusters if fused.model_fits(model.config) else ():
        shape = shape_of(model.config, config.page_size, cluster)
        if not fused.shape_fits(shape, cluster):
            continue
        machine = CudaMachine(shape, index)
        if machine.clusters_that_fit(fused.probe(shape)) >= fused.inner_chunks(shape):
            return machine, shape
        machine.close()
    shape = shape_of(model.config, config.page_size, 0)
    return CudaMachine(shape, index), shape
