"""What ranks that compute on GPUs give each other: through host memory, or from card to card.

It does not know models. Rules: addresses in, addresses out; `gather` and `collect` move bits and add nothing; `add`
leaves the order of a sum to the library, and only `free` uses it. Through host memory any machine will do, emulated
ones and ranks that share a card among them; from card to card NCCL reads and writes the machine's own memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import numpy as np

from engines.bundled.config import Float32
from engines.bundled.gpu.interface import Machine

if TYPE_CHECKING:  # they import torch
    import torch

    from engines.bundled.gpu.cuda import CudaMachine
    from engines.bundled.parallel.group import Group


class Exchange(Protocol):
    """Collectives over words of device memory, in order with the machine's launches."""

    def gather(self, mine: int, words: int, everyone: int) -> None:
        """Puts what each rank has at `mine` (words,) at `everyone` (ranks, words), at every rank."""

    def collect(self, mine: int, words: int) -> Float32:
        """The same, in host memory."""

    def add(self, values: int, words: int) -> None:
        """Puts the sum over the ranks in place of `values` (words,), at every rank."""


class HostExchange:
    """Through host memory."""

    def __init__(self, machine: Machine, group: Group) -> None:
        self._machine, self._group = machine, group

    def gather(self, mine: int, words: int, everyone: int) -> None:
        self._machine.upload(everyone, self.collect(mine, words))

    def collect(self, mine: int, words: int) -> Float32:
        return self._group.gather(_take(self._machine, mine, words))

    def add(self, values: int, words: int) -> None:
        self._machine.upload(values, self._group.all_reduce(_take(self._machine, values, words)))


class CardExchange:
    """From card to card over NCCL."""

    def __init__(self, machine: CudaMachine, group: Group) -> None:
        self._machine, self._group = machine, group

    def gather(self, mine: int, words: int, everyone: int) -> None:
        self._machine.synchronize()
        self._group.gather_into(self._view(everyone, self._group.ranks * words), self._view(mine, words))

    def collect(self, mine: int, words: int) -> Float32:
        return self._group.gather(_take(self._machine, mine, words))

    def add(self, values: int, words: int) -> None:
        self._machine.synchronize()
        self._group.reduce_in_place(self._view(values, words))

    def _view(self, address: int, words: int) -> torch.Tensor:
        return self._group.view(address, words)


def _take(machine: Machine, address: int, words: int) -> Float32:
    values = np.empty(words, np.float32)
    machine.download(address, values)
    return values


def open_exchange(machine: Machine, group: Group) -> Exchange:
    """From card to card where the group spans cards, else through host memory."""
    from engines.bundled.gpu.cuda import CudaMachine

    if group.spans_cards and isinstance(machine, CudaMachine):
        return CardExchange(machine, group)
    return HostExchange(machine, group)
