"""The whole model on one device: its pages can be saved and restored, and lent to a fast path.

It computes nothing of its own. Rules: an arithmetic in free order over lent pages has its own weights and no pages.
"""

from __future__ import annotations

from dataclasses import replace

from engines.bundled.config import EngineConfig, Model
from engines.bundled.gpu.device_pages import DeviceArray, DeviceLayer
from engines.bundled.gpu.interface import Machine, Shape
from engines.bundled.gpu.portable import GpuArithmetic
from engines.bundled.gpu.weights import GpuWeights
from engines.bundled.kernels.interface import Kernels


class LoneGpu(GpuArithmetic):
    """`portable` or `free` on one device."""

    def __init__(
        self, model: Model, config: EngineConfig, machine: Machine, shape: Shape, kernels: Kernels,
        lender: GpuWeights | None = None,
    ) -> None:  # fmt: skip
        """`lender` has the pages to use; None: pages of its own. Raises GpuMemoryError."""
        self._lender, self._source = lender, (config, kernels)
        super().__init__(model, config, machine, shape, kernels)

    def _load(self, model: Model, kv_floats: int) -> GpuWeights:
        if self._lender is None:
            return super()._load(model, kv_floats)
        loaded = super()._load(model, 0)
        pairs = zip(loaded.layers, self._lender.layers, strict=True)
        return replace(
            loaded, layers=tuple(replace(mine, keys=other.keys, values=other.values) for mine, other in pairs)
        )

    @property
    def pages(self) -> tuple[DeviceLayer, ...]:
        """KV pages by layer, as the prefix cache's store reads and writes them."""
        return tuple(
            DeviceLayer(keys=self._array(layer.keys, is_keys=True), values=self._array(layer.values, is_keys=False))
            for layer in self.weights.layers
        )

    def _array(self, address: int, *, is_keys: bool) -> DeviceArray:
        return DeviceArray(
            machine=self.machine, address=address, pages=self.pool_pages, kernels=self.shape, is_keys=is_keys
        )

    def free_over_my_pages(self, model: Model) -> LoneGpu:
        """`free` with these weights over the pages of this arithmetic. Raises GpuMemoryError."""
        config, kernels = self._source
        return LoneGpu(model, replace(config, arithmetic="free"), self.machine, self.shape, kernels, self.weights)
