"""`native` on the GPU: what torch does there, in float32 without TF32. It keeps no promise about bits.

Rules: the same code as on the CPU, on another device; torch's settings that would lower the precision are off.
"""

from __future__ import annotations

import warnings

import torch

from engines.bundled.arithmetic.native import NativeArithmetic
from engines.bundled.arithmetic.native import open_native as open_on
from engines.bundled.config import EngineConfig, Model
from engines.bundled.errors import NotSupported
from engines.bundled.gpu.interface import GpuMemoryError


def open_native(model: Model, config: EngineConfig, index: int) -> NativeArithmetic:
    """Raises NotSupported where torch sees no such GPU, GpuMemoryError, ValueError (`check_weights`)."""
    if index >= torch.cuda.device_count():
        raise NotSupported(f"device=cuda:{index}: torch {torch.__version__} sees {torch.cuda.device_count()} GPUs")
    _switch_tf32_off()
    try:
        return open_on(model, config, f"cuda:{index}")
    except torch.cuda.OutOfMemoryError as error:
        raise GpuMemoryError(f"the GPU is out of memory for native: {error}; lower num_pages") from error


def _switch_tf32_off() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # some releases of torch say that these names will go
        torch.backends.cuda.matmul.allow_tf32 = False
        torch.backends.cudnn.allow_tf32 = False
