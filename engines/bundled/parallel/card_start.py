"""Which card a rank computes on, and whether its kernels may be used there.

It does not compute. Rules: over NCCL rank r has card r to itself; over gloo the ranks take the cards in turn and may
share them; kernels that do not give the CPU's bits for the rank's own shape are not used. On the device EMULATED every
rank emulates its own card.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from engines.bundled.config import EngineConfig, Float32, Model, ModelConfig
from engines.bundled.errors import NotSupported
from engines.bundled.gpu import EMULATED
from engines.bundled.gpu.interface import GpuError, GpuMemoryError, Machine, Shape
from engines.bundled.gpu.portable import shape_of
from engines.bundled.gpu.ranks import ADD, complete_tree
from engines.bundled.gpu.selfcheck import check_arithmetic
from engines.bundled.gpu.source import digest, read_source
from engines.bundled.kernels.interface import Kernels
from engines.bundled.parallel.card import CardArithmetic, card_config
from engines.bundled.parallel.exchange import open_exchange
from engines.bundled.parallel.layout import Part, Span, additions, complete

if TYPE_CHECKING:  # it imports torch
    from engines.bundled.parallel.group import Group

_SAME = ("gpu", "gpu_capability", "gpu_cuda", "gpu_compiler")  # of all ranks


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Card:
    """A device with kernels for one rank's shape."""

    machine: Machine
    shape: Shape
    device: str
    rank: int

    @property
    def facts(self) -> Mapping[str, str]:
        """What must be the same at every rank; the kernels' digests are not, they follow the rank's shape."""
        named = {name.replace("_", " "): str(self.machine.facts[name]) for name in _SAME if name in self.machine.facts}
        return {"device": self.device, **named, "GPU kernels' source": digest(read_source())}

    def join(
        self, model: Model, config: EngineConfig, kernels: Kernels, parts: tuple[Part, ...], group: Group
    ) -> CardArithmetic:
        """Loads the shard and checks the kernels. Raises GpuMemoryError, NotSupported."""
        exchange = open_exchange(self.machine, group)
        try:
            arithmetic = CardArithmetic(model, config, self.machine, self.shape, kernels, parts, self.rank, exchange)
            check_tree(self.machine)
            if self.device != EMULATED:  # tests compare every operator there
                check_arithmetic(arithmetic)
        except GpuMemoryError:
            raise
        except GpuError as error:
            raise NotSupported(f"device={self.device}: rank {self.rank}: {error}") from error
        return arithmetic


def open_card(whole: ModelConfig, config: EngineConfig, part: Part, device: str) -> Card:
    """The device of one rank, with its kernels compiled.

    Raises:
        NotSupported: no such card, or a shape the GPU kernels are not written for.
    """
    shape = shape_of(card_config(whole, part), config.page_size, 0)
    try:
        machine = _open_machine(shape, config, part, device)
    except GpuError as error:
        raise NotSupported(f"device={device}: rank {part.rank}: {error}") from error
    return Card(machine=machine, shape=shape, device=device, rank=part.rank)


def _open_machine(shape: Shape, config: EngineConfig, part: Part, device: str) -> Machine:
    if device == EMULATED:
        from engines.bundled.gpu.emulated import EmulatedMachine

        return EmulatedMachine(shape)
    from engines.bundled.gpu.cuda import CudaMachine
    from engines.bundled.gpu.driver import count_devices

    cards = count_devices()
    if config.collectives == "nccl" and cards < part.ranks:
        raise GpuError(f"collectives=nccl: {part.ranks} ranks need a GPU each, {cards} are here; use collectives=gloo")
    return CudaMachine(shape, part.rank % cards)


def check_tree(machine: Machine) -> None:
    """Raises GpuError unless the tree over eleven sums is T to the last bit, subnormal sums and zeros included."""
    sums = [_stirred(number) for number in range(11)]
    spans = {Span(number, number + 1): values for number, values in enumerate(sums)}
    start = _stirred(11)
    expected = start + complete(len(sums), spans, np.add)
    words = [ADD if node is None else node.begin for node in additions(len(sums), spans)]
    at_sums, at_words = machine.allocate(11 * start.size), machine.allocate(len(words))
    at_hidden, found = machine.allocate(start.size), np.empty_like(start)
    machine.upload(at_sums, np.concatenate(sums))
    machine.upload(at_words, np.array(words, np.int32))
    machine.upload(at_hidden, start)
    machine.launch(complete_tree(at_sums, at_words, len(words), at_hidden, start.size))
    machine.download(at_hidden, found)
    for address in (at_sums, at_words, at_hidden):
        machine.release(address)
    differing = int(np.count_nonzero(found.view(np.int32) != expected.view(np.int32)))
    if differing:
        raise GpuError(f"self-check: the tree over ranks differs from the CPU's in {differing} of 1000 elements")


def _stirred(seed: int) -> Float32:
    """Values of very different sizes, some subnormal, some -0.0."""
    random = np.random.default_rng(seed)
    values = random.standard_normal(1000) * np.exp2(random.integers(-140, 4, 1000))
    values[::17] = -0.0
    stirred: Float32 = values.astype(np.float32)
    return stirred
