"""The bundled engine on an NVIDIA GPU: `portable` with the CPU's bits, `tensorcore` in bfloat16, `free` and `native`.

It does not know requests or scheduling. Rules: nothing here imports torch unless `native` or bfloat16 asks; what this
machine lacks is said when the arithmetic is opened; kernels that do not give the CPU's bits on a start-up check are not
used.
"""

from __future__ import annotations

from dataclasses import replace

from engines.bundled.batch import Arithmetic
from engines.bundled.config import EngineConfig, Model, ModelConfig
from engines.bundled.errors import NotSupported

EMULATED = "emulated"  # the GPU's kernels of `portable` and `free`, run by this host
DEVICES = ("cpu", "cuda", EMULATED)
CLUSTERS = (8, 16)  # sizes of fused decode's clusters, the preferred one first


def open_gpu_arithmetic(model: Model, config: EngineConfig, device: str) -> Arithmetic:
    """The arithmetic `config.arithmetic` on `device` ("cuda", "cuda:1", "emulated"): weights and pages go to the card.

    `config.num_pages` has to be settled (`fit_pages` keeps it within the card's memory).
    Limits on positions are those of `open_arithmetic`.

    Raises:
        NotSupported: no driver, no NVRTC, a card or a model these kernels are not written for, or a failed self-check.
        GpuMemoryError: weights and KV pages do not fit.
        ValueError: another arithmetic or device name, or a model whose weights do not fit its shape.
    """
    if device == EMULATED:
        return _open_emulated(model, config)
    index = device_index(device)
    if config.dtype == "bfloat16":
        return _open_bfloat16(model, config, index)
    if config.arithmetic == "tensorcore":
        raise NotSupported("arithmetic=tensorcore computes in bfloat16; set dtype=bfloat16")
    if config.arithmetic == "native":
        from engines.bundled.gpu.native import open_native

        return open_native(model, config, index)
    if config.arithmetic not in ("portable", "free"):
        raise ValueError(f"arithmetic: expected portable, free or native on a GPU, got {config.arithmetic!r}")
    from engines.bundled.gpu.start import start_kernels

    return start_kernels(model, config, index)


def check_dtype(config: EngineConfig, device: str) -> None:
    """Raises NotSupported for bfloat16 without a GPU to compute it, and for settings that nothing here would read."""
    if device == "cpu" and config.enforce_eager:
        raise NotSupported("enforce_eager=true: a CPU has no recorded graphs to do without; set device=cuda")
    if device == "cpu" and (config.arithmetic == "tensorcore" or config.dtype != "float32"):
        raise NotSupported(
            f"arithmetic={config.arithmetic}, dtype={config.dtype}: bfloat16 runs on an NVIDIA GPU alone; "
            "set device=cuda on a machine that has one"
        )
    if config.k_order != "chain" and config.dtype == "float32":
        raise NotSupported(
            f"k_order={config.k_order}: float32 sums have one order, that of arithmetic={config.arithmetic}; set "
            "k_order=chain, or arithmetic=tensorcore"
        )


def _open_emulated(model: Model, config: EngineConfig) -> Arithmetic:
    if config.arithmetic not in ("portable", "free") or config.dtype != "float32":
        raise NotSupported(
            f"device=emulated: arithmetic={config.arithmetic}, dtype={config.dtype} needs an NVIDIA GPU; "
            "this host emulates the float32 kernels of portable and free"
        )
    from engines.bundled.gpu.start import start_emulated

    return start_emulated(model, config)


def _open_bfloat16(model: Model, config: EngineConfig, index: int) -> Arithmetic:
    if config.arithmetic == "portable":
        raise NotSupported("arithmetic=portable is defined in float32; set dtype=float32, or arithmetic=tensorcore")
    try:
        from engines.bundled.gpu.tensorcore.start import open_model
    except ImportError as error:
        raise NotSupported(f"dtype=bfloat16 needs Triton, which comes with CUDA builds of torch: {error}") from error
    return open_model(model, config, index)


def fit_pages(model: ModelConfig, config: EngineConfig, device: str) -> EngineConfig:
    """The config with as many pages as `config.kv_fraction` of the memory left after the weights holds.

    A fraction of 0: as many as `config.num_pages` asks for, within KV_FRACTION of that memory. The pool, a part of the
    fingerprint, then follows the model alone as long as the card has room.

    Raises:
        NotSupported: no GPU, or a fraction of 1 or more.
        GpuMemoryError: not even one full context fits.
    """
    from engines.bundled.gpu.memory import KV_FRACTION, memory_left, pages_in

    fraction = config.kv_fraction
    if fraction >= 1:
        raise NotSupported(f"kv_fraction: expected 0, or a number below 1, got {fraction}")
    left = memory_left(free_bytes(device), model, config.dtype)
    most = pages_in(left, model, config.page_size, fraction or KV_FRACTION, config.dtype)
    return replace(config, num_pages=most if fraction else min(config.num_pages, most))


def free_bytes(device: str) -> int:
    """Free memory of the card, or what an emulated one pretends to have. Raises NotSupported where there is none."""
    from engines.bundled.gpu.cuda import open_driver
    from engines.bundled.gpu.interface import GpuError
    from engines.bundled.gpu.memory import EMULATED_BYTES

    if device == EMULATED:
        return EMULATED_BYTES
    try:
        return open_driver(device_index(device)).free_bytes()
    except GpuError as error:
        raise NotSupported(f"device={device}: {error}") from error


def device_index(device: str) -> int:
    """0 for "cuda", n for "cuda:n". Raises ValueError."""
    kind, _, number = device.partition(":")
    if kind != "cuda" or (number and not number.isdecimal()):
        raise ValueError(f"device: expected cuda or cuda:N, got {device!r}")
    return int(number or 0)


def why_not() -> str | None:
    """Why there is no GPU arithmetic on this machine, or None where there is one."""
    from engines.bundled.gpu.cuda import open_driver
    from engines.bundled.gpu.interface import GpuError
    from engines.bundled.gpu.nvrtc import Nvrtc

    try:
        open_driver()
        Nvrtc()
    except GpuError as error:
        return str(error)
    return None
