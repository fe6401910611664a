"""Mixture of experts: a router sends each row to a few small MLPs, whose outputs are mixed by its weights.

It does not know layers, steps or ranks. Rules: docs/numerics.md, Mixture of experts: experts are chosen by
(probability descending, id ascending) and kept in ascending id; nothing is dropped by capacity; a row's outputs do not
depend on which other rows an expert gets.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from engines.bundled.arithmetic.order import Order
from engines.bundled.config import Float32, Int32, Model
from engines.bundled.kernels.interface import Kernels, Weight


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Experts:
    """The router and the experts `first`, `first` + 1, … of one layer; a process that is not alone may hold a part."""

    router: Weight
    first: int
    gate_up: tuple[Weight, ...]
    down: tuple[Weight, ...]
    per_token: int

    def matrices(self) -> Iterator[Weight]:
        """Every packed matrix."""
        yield self.router
        yield from self.gate_up
        yield from self.down

    def holds(self, expert: Int32) -> np.ndarray[tuple[int, ...], np.dtype[np.bool_]]:
        """Which of these expert ids are held here, same shape."""
        here: np.ndarray[tuple[int, ...], np.dtype[np.bool_]] = (expert >= self.first) & (
            expert < self.first + len(self.down)
        )
        return here


class Routing(NamedTuple):
    """Which experts each of T rows goes to, in ascending id, and with what weight."""

    expert: Int32  # (T, k)
    weight: Float32  # (T, k)


def pack_experts(model: Model, layer: int, held: range, kernels: Kernels, threads: int) -> Experts:
    """Packs the router and the experts `held` of a layer."""
    prefix, weights = f"model.layers.{layer}.mlp", model.weights

    def pack(expert: int, *names: str) -> Weight:
        parts = [weights[f"{prefix}.experts.{expert}.{name}.weight"] for name in names]
        return kernels.pack(np.concatenate(parts), threads)

    return Experts(
        router=kernels.pack(np.ascontiguousarray(weights[f"{prefix}.gate.weight"]), threads),
        first=held.start,
        gate_up=tuple(pack(expert, "gate_proj", "up_proj") for expert in held),
        down=tuple(pack(expert, "down_proj") for expert in held),
        per_token=model.config.num_experts_per_tok,
    )


def route(kernels: Kernels, experts: Experts, x: Float32, order: Order, threads: int) -> Routing:
    """Where each row of x (T, hidden) goes."""
    logits = np.empty((len(x), experts.router.rows), np.float32)
    kernels.linear(x, experts.router, order.gate_up, threads, logits)
    return Routing(*kernels.route(logits, experts.per_token, threads))


def run_experts(
    kernels: Kernels, experts: Experts, x: Float32, routing: Routing, order: Order, threads: int
) -> Float32:
    """(T, k, hidden): what each chosen expert says of each row; slots of experts held elsewhere stay unset."""
    outputs = np.empty((*routing.expert.shape, x.shape[1]), np.float32)
    for index, (gate_up, down) in enumerate(zip(experts.gate_up, experts.down, strict=True)):
        rows, slots = np.nonzero(routing.expert == experts.first + index)
        if not len(rows):
            continue
        said = np.empty((len(rows), down.rows), np.float32)
        kernels.linear(gate(kernels, gate_up, x[rows], order, threads), down, order.expert_down, threads, said)
        outputs[rows, slots] = said
    return outputs


def gate(kernels: Kernels, gate_up: Weight, x: Float32, order: Order, threads: int) -> Float32:
    """(T, inner) of one expert, or of the part of it whose matrix this is: before its down projection."""
    both, gated = (np.empty((len(x), width), np.float32) for width in (gate_up.rows, gate_up.rows // 2))
    kernels.linear(x, gate_up, order.gate_up, threads, both)
    kernels.swiglu(both, threads, gated)
    return gated
