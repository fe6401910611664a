"""What the GPU arithmetics ask of a machine: memory, kernels by name, recorded launches. No model, no arithmetic.

Two machines keep it: `cuda.CudaMachine` (the driver API) and `emulated.EmulatedMachine` (g++ on this host), so that
whatever decides on launches is the same code in both. Rules: addresses are plain integers; launches run in order.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from engines.bundled.errors import BundledError

Array = npt.NDArray[np.float32] | npt.NDArray[np.int32]


class GpuError(BundledError):
    """The driver or the run-time compiler refused something; the message says what."""


class GpuMemoryError(GpuError):
    """The card's memory does not hold what was asked for; the message says how much is missing and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The constants a set of kernels is compiled for: one model shape, one page size."""

    hidden: int
    inner: int
    heads: int
    kv_heads: int
    dim: int
    width: int  # of a chunk of K
    page: int  # tokens per KV page
    cluster: int  # blocks that share a KV head or a chunk of the inner width in fused decode; 0: no fused decode

    def defines(self) -> dict[str, int]:
        """Names and values as the kernels know them."""
        return {
            "HIDDEN": self.hidden,
            "INTER": self.inner,
            "HEADS": self.heads,
            "KV_HEADS": self.kv_heads,
            "DIM": self.dim,
            "WIDTH": self.width,
            "PAGE": self.page,
            "CLUSTER": max(self.cluster, 1),
            "FUSED": int(self.cluster > 0),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """One kernel launch. Arguments are addresses, ints and floats under the names of `arguments.FIELDS`."""

    kernel: str
    grid: tuple[int, int, int]
    block: int
    shared: int  # bytes
    arguments: Mapping[str, int | float]
    cluster: int = 1  # blocks of a cluster: along z when it equals grid z, else along x
    overlap: bool = True  # may start while the launch before still runs; the kernel waits where it reads


class Recording(Protocol):
    """A sequence of launches that can be run again with what its buffers hold by then."""

    def replay(self) -> None:
        """Runs it."""

    def close(self) -> None:
        """Gives back what it holds; it cannot run any more."""


class Machine(Protocol):
    """Memory and kernels of one device, for one `Shape`."""

    facts: dict[str, str | int | float | bool]  # device, driver, compiler, digest of the compiled kernels

    def allocate(self, count: int) -> int:
        """Address of `count` 4-byte words, uninitialised. Raises GpuMemoryError."""

    def release(self, address: int) -> None:
        """Gives an allocation back after all launches so far."""

    def upload(self, address: int, array: Array) -> None:
        """Copies a C-contiguous float32 or int32 array to the device."""

    def download(self, address: int, array: Array) -> None:
        """Waits for all launches so far and copies to `array`."""

    def launch(self, launch: Launch) -> None:
        """Starts a kernel after all earlier ones."""

    def record(self, launches: list[Launch]) -> Recording:
        """The launches as one thing (a CUDA graph)."""

    def free_bytes(self) -> int:
        """Memory that can still be allocated."""

    def device_of(self, address: int) -> str | None:
        """On which device the memory at an address lies; None where that cannot be said."""

    def clusters_that_fit(self, launch: Launch) -> int:
        """How many clusters of this launch run at the same time; 0 when none does."""

    def close(self) -> None:
        """Gives all memory back."""
