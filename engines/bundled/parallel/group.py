"""Collectives between the ranks of one model, over torch.distributed: gloo on CPUs, NCCL through a GPU per rank.

It does not know models. Rules: arrays go in and come out as numpy, or lie on a card already; gathering and
broadcasting copy bits and add nothing, so no library decides an order of sums; `all_reduce` and `reduce_in_place`
leave that order to the library, and only `free` uses them; every call ends by the deadline, with a CollectiveError when
a rank is gone or silent. NCCL does not notice by itself that a process is gone, so `watch` is asked while a call waits.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import cast

import numpy as np
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ProcessGroup, ProcessGroupGloo, Store, TCPStore, Work

from engines.bundled.config import Float32, Int32
from engines.bundled.errors import RankError
from engines.bundled.parallel.wire import CollectiveError

HOST = "127.0.0.1"
BACKENDS = ("gloo", "nccl")
WATCH_S = 0.2  # between two looks at the other ranks while a collective over NCCL waits


def open_store(port: int, ranks: int, deadline_s: float) -> TCPStore:
    """Where the ranks find each other, on this machine alone; `port` 0 is any free one. Raises RankError."""
    try:
        return TCPStore(
            HOST, port, ranks, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=deadline_s)
        )
    except RuntimeError as error:  # DistNetworkError and its kin
        reason = "it is in use by another process" if "EADDRINUSE" in str(error) else str(error).splitlines()[0]
        raise RankError(f"rendezvous_port {port} of {HOST} cannot be opened: {reason}; 0 takes any free one") from error


def find_store(port: int, ranks: int, deadline_s: float) -> TCPStore:
    """The first rank's store, as another rank sees it. Raises RankError."""
    try:
        return TCPStore(HOST, port, ranks, is_master=False, timeout=timedelta(seconds=deadline_s))
    except RuntimeError as error:
        raise RankError(f"the first rank's store on port {port} of {HOST} does not answer: {error}") from error


class Group:
    """One rank's membership; a process may be in several groups at once."""

    def __init__(
        self, store: Store, rank: int, ranks: int, backend: str, deadline_s: float,
        watch: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        """Waits for the other ranks. Raises CollectiveError when they do not come within `deadline_s`.

        `watch` raises CollectiveError when it sees that another rank is gone.
        """
        self.rank, self.ranks = rank, ranks
        self._deadline_s, self._watch, self._broken = deadline_s, watch, False
        self._device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
        self._store: Store | None = store
        with self._collective("joining the group"):
            self._backend: ProcessGroup | None = _open_backend(store, rank, ranks, backend, deadline_s)
            self._wait(self._open().allreduce([torch.zeros(1, device=self._device)]))  # everybody is here

    def broadcast(self, values: Int32) -> None:
        """Fills `values` (N,) of every rank with the first rank's."""
        tensor = torch.from_numpy(values).to(self._device)
        with self._collective("broadcast"):
            self._wait(self._open().broadcast(tensor, 0))
        if self._device.type != "cpu":
            values[...] = tensor.cpu().numpy()

    def gather(self, part: Float32) -> Float32:
        """(ranks, *part.shape): what each rank gave, at every rank; all give the same shape."""
        mine = torch.from_numpy(part).to(self._device)
        everyone = torch.empty((self.ranks, *part.shape), device=self._device)
        with self._collective("all-gather"):
            self._wait(self._open().allgather([list(everyone)], [mine]))
        result: Float32 = everyone.cpu().numpy()
        return result

    def all_reduce(self, values: Float32) -> Float32:
        """The sum over ranks in whatever order the library adds, the same at every rank."""
        tensor = torch.from_numpy(np.ascontiguousarray(values)).to(self._device)
        with self._collective("all-reduce"):
            self._wait(self._open().allreduce([tensor]))
        result: Float32 = tensor.cpu().numpy()
        return result

    @property
    def spans_cards(self) -> bool:
        """True where every rank has a card of its own."""
        return self._device.type != "cpu"

    def view(self, address: int, words: int) -> torch.Tensor:
        """(words,) float32 that lie on this rank's card."""
        return torch.as_tensor(_OnCard(address, words), device=self._device)

    def gather_into(self, everyone: torch.Tensor, mine: torch.Tensor) -> None:
        """Fills `everyone` (ranks * words,) on the card with what each rank gave; returns when it is there."""
        with self._collective("all-gather"):
            self._wait(self._open().allgather([list(everyone.view(self.ranks, -1))], [mine]))

    def reduce_in_place(self, values: torch.Tensor) -> None:
        """Puts the sum over ranks, in the library's order, in place of `values` on the card."""
        with self._collective("all-reduce"):
            self._wait(self._open().allreduce([values]))

    def close(self) -> None:
        """Leaves the group, whole or broken. Its threads must be gone before the interpreter is."""
        if self._backend is not None and self.spans_cards:
            if self._broken:  # what still waits on the card for a lost rank would keep a shutdown waiting
                cast("dist.ProcessGroupNCCL", self._backend).abort()
            else:
                self._backend.shutdown()
        self._backend = self._store = None

    def _open(self) -> ProcessGroup:
        if self._backend is None:
            raise CollectiveError(f"rank {self.rank} has left the group")
        return self._backend

    def _wait(self, work: Work) -> None:
        if not self.spans_cards:
            work.wait()
            return
        begun = looked = time.monotonic()
        while not work.is_completed():
            now = time.monotonic()
            if now - begun > self._deadline_s:
                raise RuntimeError(f"not over after {self._deadline_s:.0f} s")
            if now - looked > WATCH_S:
                self._watch()
                looked = now
        work.wait()
        torch.cuda.synchronize(self._device)

    @contextmanager
    def _collective(self, what: str) -> Iterator[None]:
        try:
            yield
        except BaseException as error:  # an interrupt, too: it leaves others waiting in the meeting
            self._broken = True
            if isinstance(error, CollectiveError) or not isinstance(error, RuntimeError):
                raise
            first = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise CollectiveError(f"rank {self.rank}: {what} failed: {first}") from error


class _OnCard:
    """Device memory that torch did not allocate, as torch takes it."""

    def __init__(self, address: int, words: int) -> None:
        self.__cuda_array_interface__ = {
            "version": 3, "shape": (words,), "typestr": "<f4", "data": (address, False), "strides": None,
        }  # fmt: skip


def _open_backend(store: Store, rank: int, ranks: int, backend: str, deadline_s: float) -> ProcessGroup:
    """Raises RankError where a rank has no GPU of its own."""
    deadline = timedelta(seconds=deadline_s)
    if backend != "nccl":
        return cast("ProcessGroup", ProcessGroupGloo(store, rank, ranks, deadline))
    if torch.cuda.device_count() < ranks:
        raise RankError(f"collectives=nccl: {ranks} ranks need a GPU each, {torch.cuda.device_count()} are here")
    torch.cuda.set_device(rank)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = 4 * deadline  # noqa: SLF001 - the one way to set it; it ends the process, ours names the rank
    return cast("ProcessGroup", dist.ProcessGroupNCCL(store, rank, ranks, options))  # the same methods
