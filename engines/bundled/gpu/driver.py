"""The CUDA driver API through ctypes: the calls we use, each checked. It knows no kernels.

Rules: every return code is looked at; an error names the call and CUDA's own words; the context is the device's primary
one, so that torch may live in the same process.
"""

from __future__ import annotations

import ctypes
from typing import Any

from engines.bundled.gpu.interface import GpuError

Pointer = ctypes.c_void_p
OUT_OF_MEMORY = 2
COMPUTE_MAJOR, COMPUTE_MINOR, MULTIPROCESSORS, SHARED_OPT_IN = 75, 76, 16, 97  # device attributes
MAX_DYNAMIC_SHARED, NON_PORTABLE_CLUSTER = 8, 14  # function attributes
CLUSTER_DIMENSION, STREAM_SERIALIZATION = 4, 6  # launch attributes
MEMORY_TYPE, DEVICE_ORDINAL, DEVICE_MEMORY = 2, 9, 2  # pointer attributes, and a value of the first


class _Value(ctypes.Union):
    _fields_ = (("pad", ctypes.c_char * 64), ("words", ctypes.c_uint * 16))


class LaunchAttribute(ctypes.Structure):
    """CUlaunchAttribute."""

    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_char * 4), ("value", _Value))


class LaunchConfig(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", Pointer),
        ("attributes", ctypes.POINTER(LaunchAttribute)),
        ("count", ctypes.c_uint),
    )


def count_devices() -> int:
    """NVIDIA GPUs of this machine, without a context on any. Raises GpuError when there is no driver."""
    library, count = _open_library(), ctypes.c_int()
    for name, arguments in (("cuInit", (0,)), ("cuDeviceGetCount", (ctypes.byref(count),))):
        code = int(getattr(library, name)(*arguments))
        if code != 0:
            raise GpuError(f"{name}: code {code}")
    return count.value


def _open_library() -> Any:  # noqa: ANN401 - its functions are looked up by name
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise GpuError(f"no NVIDIA driver on this machine ({error})") from error


class Driver:
    """libcuda with one device's primary context current."""

    def __init__(self, device: int = 0) -> None:
        """Raises GpuError when there is no driver or no such device."""
        self.library: Any = _open_library()
        self.call("cuInit", 0)
        self.device = ctypes.c_int()
        self.call("cuDeviceGet", ctypes.byref(self.device), device)
        context = Pointer()
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), self.device)
        self.call("cuCtxSetCurrent", context)

    def try_call(self, name: str, *arguments: object) -> int:
        """The call's return code."""
        return int(getattr(self.library, name)(*arguments))

    def call(self, name: str, *arguments: object) -> None:
        """Raises GpuError unless the call returns 0."""
        code = self.try_call(name, *arguments)
        if code != 0:
            text = ctypes.c_char_p()
            self.library.cuGetErrorString(code, ctypes.byref(text))
            raise GpuError(f"{name}: {(text.value or b'unknown error').decode()} (code {code})")

    def attribute(self, number: int) -> int:
        """A device attribute."""
        value = ctypes.c_int()
        self.call("cuDeviceGetAttribute", ctypes.byref(value), number, self.device)
        return value.value

    def device_name(self) -> str:
        """The card's name."""
        text = ctypes.create_string_buffer(128)
        self.call("cuDeviceGetName", text, 128, self.device)
        return text.value.decode()

    def version(self) -> str:
        """The CUDA version the driver speaks."""
        value = ctypes.c_int()
        self.call("cuDriverGetVersion", ctypes.byref(value))
        return f"{value.value // 1000}.{value.value % 1000 // 10}"

    def free_bytes(self) -> int:
        """Free memory of the card."""
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self.call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        return free.value
