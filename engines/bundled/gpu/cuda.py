"""The kernels on an NVIDIA GPU: memory, launches and CUDA graphs over the driver API.

It knows no model. Rules: one stream; every launch may start before its predecessor ends (the kernels wait where they
read); what is allocated is given back by `close`.
"""

from __future__ import annotations

import ctypes
from dataclasses import replace
from functools import cache

import numpy as np

from engines.bundled.gpu import driver as cu
from engines.bundled.gpu.arguments import FIELDS, FUSED_FIELDS, pack_arguments
from engines.bundled.gpu.driver import Driver, LaunchAttribute, LaunchConfig, Pointer
from engines.bundled.gpu.interface import Array, GpuError, Launch, Shape
from engines.bundled.gpu.ledger import note_kernels
from engines.bundled.gpu.memory import out_of_memory
from engines.bundled.gpu.nvrtc import Nvrtc, forbidden_instructions

OLDEST = 80  # compute capability: asynchronous copies to shared memory
LINKED = 90  # clusters, bulk copies, overlapping launches


@cache
def open_driver(device: int = 0) -> Driver:
    """One driver per process and device. Raises GpuError."""
    return Driver(device)


class CudaRecording:
    """An instantiated CUDA graph."""

    def __init__(self, machine: CudaMachine, executable: Pointer, kernels: int) -> None:
        self._machine, self._executable, self._kernels = machine, executable, kernels

    def replay(self) -> None:
        """Launches the graph after all earlier work."""
        self._machine.driver.call("cuGraphLaunch", self._executable, self._machine.stream)
        note_kernels(self._kernels)

    def close(self) -> None:
        """Destroys the graph."""
        self._machine.recordings.remove(self)
        self._machine.driver.call("cuGraphExecDestroy", self._executable)


class CudaMachine:
    """One device with the kernels of one shape."""

    def __init__(self, shape: Shape, device: int = 0) -> None:
        """Compiles and loads the kernels. Raises GpuError."""
        self.driver = open_driver(device)
        d = self.driver
        capability = 10 * d.attribute(cu.COMPUTE_MAJOR) + d.attribute(cu.COMPUTE_MINOR)
        if capability < OLDEST:
            raise GpuError(f"{d.device_name()} has compute capability {capability / 10}; 8.0 or newer is needed")
        self.linked = capability >= LINKED
        compiled = Nvrtc().compile(shape, f"sm_{capability}")
        self.forbidden = forbidden_instructions(compiled.ptx)
        if self.forbidden:
            raise GpuError(f"NVRTC {compiled.version} put {', '.join(self.forbidden)} into the kernels: not IEEE")
        self.multiprocessors = d.attribute(cu.MULTIPROCESSORS)
        self.shared_limit = d.attribute(cu.SHARED_OPT_IN)
        self.facts: dict[str, str | int | float | bool] = {
            "gpu": d.device_name(),
            "gpu_capability": f"{capability // 10}.{capability % 10}",
            "gpu_cuda": d.version(),
            "gpu_compiler": f"NVRTC {compiled.version}",
            "gpu_kernels_digest": compiled.digest,
            "gpu_multiprocessors": self.multiprocessors,
            "gpu_linked": self.linked,
        }
        self._held: list[int] = []
        self.recordings: list[CudaRecording] = []
        self.module, self.stream = Pointer(), Pointer()
        d.call("cuModuleLoadData", ctypes.byref(self.module), compiled.cubin)
        d.call("cuStreamCreate", ctypes.byref(self.stream), 1)
        self._functions = {name: self._function(name) for name in self._names(shape)}

    def _names(self, shape: Shape) -> list[str]:
        return sorted(FIELDS | FUSED_FIELDS if shape.cluster and self.linked else FIELDS)

    def _function(self, name: str) -> Pointer:
        function = Pointer()
        self.driver.call("cuModuleGetFunction", ctypes.byref(function), self.module, name.encode())
        self.driver.call("cuFuncSetAttribute", function, cu.MAX_DYNAMIC_SHARED, self.shared_limit)
        if self.linked:
            self.driver.call("cuFuncSetAttribute", function, cu.NON_PORTABLE_CLUSTER, 1)
        return function

    def allocate(self, count: int) -> int:
        """Device memory."""
        address = ctypes.c_uint64()
        code = self.driver.try_call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(4 * max(count, 1)))
        if code == cu.OUT_OF_MEMORY:
            raise out_of_memory(4 * count, self.free_bytes())
        if code != 0:
            raise GpuError(f"cuMemAlloc of {4 * count} bytes: code {code}")
        self._held.append(address.value)
        return address.value

    def release(self, address: int) -> None:
        """Frees device memory."""
        self.synchronize()
        self._held.remove(address)
        self.driver.call("cuMemFree_v2", ctypes.c_uint64(address))

    def upload(self, address: int, array: Array) -> None:
        """Host to device, in order with launches; the array may be reused on return."""
        source = np.ascontiguousarray(array)
        if source.nbytes:
            where, size = source.ctypes.data, ctypes.c_size_t(source.nbytes)
            self.driver.call("cuMemcpyHtoDAsync_v2", ctypes.c_uint64(address), Pointer(where), size, self.stream)
            self.synchronize()

    def download(self, address: int, array: Array) -> None:
        """Device to host, after all launches so far."""
        if array.nbytes:
            where, size = array.ctypes.data, ctypes.c_size_t(array.nbytes)
            self.driver.call("cuMemcpyDtoHAsync_v2", Pointer(where), ctypes.c_uint64(address), size, self.stream)
        self.synchronize()

    def synchronize(self) -> None:
        """Waits for everything."""
        self.driver.call("cuStreamSynchronize", self.stream)

    def launch(self, launch: Launch) -> None:
        """Starts one kernel."""
        self._submit(launch)
        note_kernels(1)

    def _submit(self, launch: Launch) -> None:
        """To the stream, or into the graph that is being captured from it."""
        arguments = pack_arguments(launch.kernel, launch.arguments)
        parameters = (ctypes.c_void_p * 1)(ctypes.addressof(arguments))
        config, keep = self._config(launch)
        self.driver.call("cuLaunchKernelEx", ctypes.byref(config), self._functions[launch.kernel], parameters, None)
        del keep

    def _config(self, launch: Launch) -> tuple[LaunchConfig, object]:
        attributes = (LaunchAttribute * 2)()
        count = 0
        if self.linked and launch.overlap:
            attributes[0].id = cu.STREAM_SERIALIZATION
            attributes[0].value.words[0] = 1
            count = 1
        if launch.cluster > 1:
            attributes[count].id = cu.CLUSTER_DIMENSION
            deep = launch.cluster == launch.grid[2]
            dimensions = (1, 1, launch.cluster) if deep else (launch.cluster, 1, 1)
            attributes[count].value.words[0:3] = dimensions
            count += 1
        config = LaunchConfig(
            grid=(ctypes.c_uint * 3)(*launch.grid),
            block=(ctypes.c_uint * 3)(launch.block, 1, 1),
            shared=launch.shared,
            stream=self.stream,
            attributes=ctypes.cast(attributes, ctypes.POINTER(LaunchAttribute)),
            count=count,
        )
        return config, attributes

    def record(self, launches: list[Launch]) -> CudaRecording:
        """Captures the launches into a CUDA graph."""
        graph, executable = Pointer(), Pointer()
        self.driver.call("cuStreamBeginCapture_v2", self.stream, 2)
        for launch in launches:
            self._submit(launch)
        self.driver.call("cuStreamEndCapture", self.stream, ctypes.byref(graph))
        self.driver.call("cuGraphInstantiateWithFlags", ctypes.byref(executable), graph, ctypes.c_uint64(0))
        self.driver.call("cuGraphDestroy", graph)
        self.recordings.append(CudaRecording(self, executable, len(launches)))
        return self.recordings[-1]

    def free_bytes(self) -> int:
        """Free memory of the card."""
        return self.driver.free_bytes()

    def device_of(self, address: int) -> str | None:
        """By the driver's own record of the address."""
        kind, ordinal, where = ctypes.c_uint(), ctypes.c_int(), ctypes.c_uint64(address)
        for found, attribute in ((kind, cu.MEMORY_TYPE), (ordinal, cu.DEVICE_ORDINAL)):
            if self.driver.try_call("cuPointerGetAttribute", ctypes.byref(found), attribute, where) != 0:
                return None
        return f"cuda:{ordinal.value}" if kind.value == cu.DEVICE_MEMORY else None

    def clusters_that_fit(self, launch: Launch) -> int:
        """By the driver's occupancy calculator; 0 before compute capability 9.0 and where shared memory is short."""
        if not self.linked or launch.shared > self.shared_limit:
            return 0
        config, keep = self._config(replace(launch, overlap=False))
        count = ctypes.c_int()
        code = self.driver.try_call(
            "cuOccupancyMaxActiveClusters", ctypes.byref(count), self._functions[launch.kernel], ctypes.byref(config)
        )
        del keep
        return count.value if code == 0 else 0

    def measure(self, recording: CudaRecording, repetitions: int) -> list[float]:
        """Microseconds of each replay, by events on the device."""
        events = [(Pointer(), Pointer()) for _ in range(repetitions)]
        for pair in events:
            for event in pair:
                self.driver.call("cuEventCreate", ctypes.byref(event), 0)
        for before, after in events:
            self.driver.call("cuEventRecord", before, self.stream)
            recording.replay()
            self.driver.call("cuEventRecord", after, self.stream)
        self.synchronize()
        times = []
        for before, after in events:
            elapsed = ctypes.c_float()
            self.driver.call("cuEventElapsedTime", ctypes.byref(elapsed), before, after)
            times.append(1000.0 * elapsed.value)
            self.driver.call("cuEventDestroy_v2", before)
            self.driver.call("cuEventDestroy_v2", after)
        return times

    def close(self) -> None:
        """Gives memory, graphs and code back."""
        self.synchronize()
        for recording in list(self.recordings):
            recording.close()
        for address in self._held:
            self.driver.call("cuMemFree_v2", ctypes.c_uint64(address))
        self._held.clear()
        self.driver.call("cuModuleUnload", self.module)
