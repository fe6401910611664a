"""Mixtures of experts in bfloat16: routing, products of pairs (token, expert), the mix. Each launches its kernel.

It knows no model and no step. Rules: a pair is a tile of its own, so that nothing follows from who else chose the same
expert; experts are mixed in ascending id; nothing is read back to the host.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
from torch.nn import functional

from engines.bundled.gpu.tensorcore import expert_kernels as kernels
from engines.bundled.gpu.tensorcore.operators import swiglu

Tensor = torch.Tensor
OUTPUTS, INPUTS = 64, 128  # of a tile


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ExpertWeights:
    """Of one layer: router (E, hidden), gate_up (E, 2 inner, hidden), down (E, hidden, inner)."""

    router: Tensor
    gate_up: Tensor
    down: Tensor
    per_token: int


class Routing(NamedTuple):
    """The experts of each row, ascending (T, k) int32, and their weights (T, k) float32."""

    expert: Tensor
    weight: Tensor


def route(logits: Tensor, k: int) -> Routing:
    """By probability descending, id ascending; weights add up to one."""
    rows, experts = logits.shape
    expert = torch.empty((rows, k), dtype=torch.int32, device=logits.device)
    weight = torch.empty((rows, k), dtype=torch.float32, device=logits.device)
    kernels.route_kernel[(rows,)](
        logits, expert, weight, experts, k, BLOCK=triton.next_power_of_2(experts), num_warps=4, enable_fp_fusion=False
    )
    return Routing(expert, weight)


def product(x: Tensor, weights: Tensor, expert: Tensor, fan: int) -> Tensor:
    """(pairs, N): row p // fan of x times the weights (N, K) of the pair's expert, transposed."""
    pairs, (_, outputs, inputs) = expert.numel(), weights.shape
    out = torch.empty((pairs, outputs), dtype=x.dtype, device=x.device)
    kernels.expert_kernel[(triton.cdiv(outputs, OUTPUTS), pairs)](
        x, weights, expert, out, outputs, inputs, fan, BM=16, BN=OUTPUTS, BK=INPUTS, num_warps=4, num_stages=3
    )
    return out


def mix(said: Tensor, routing: Routing) -> Tensor:
    """(T, hidden) from (pairs, hidden): the weighted sum, rounded once."""
    rows, k = routing.expert.shape
    columns = said.shape[1]
    out = torch.empty((rows, columns), dtype=said.dtype, device=said.device)
    block = 1024
    kernels.mix_kernel[(rows, triton.cdiv(columns, block))](
        said, routing.weight, out, columns, k, BLOCK=block, num_warps=4, enable_fp_fusion=False
    )
    return out


def run_experts(x: Tensor, logits: Tensor, weights: ExpertWeights) -> Tensor:
    """(T, hidden): what the chosen experts say of each row of x."""
    routing = route(logits, weights.per_token)
    gated = swiglu(product(x, weights.gate_up, routing.expert, weights.per_token))
    return mix(product(gated, weights.down, routing.expert, 1), routing)


def run_plain_experts(x: Tensor, logits: Tensor, weights: ExpertWeights) -> Tensor:
    """The same by torch, every expert for every row: slow, and nothing that a recorded step could not do."""
    probability = torch.softmax(logits.float(), -1)
    top, chosen = torch.topk(probability, weights.per_token, dim=-1)
    share = torch.zeros_like(probability).scatter_(1, chosen, top / top.sum(-1, keepdim=True))
    out = torch.zeros_like(x)
    for expert in range(len(weights.router)):
        gate, up = functional.linear(x, weights.gate_up[expert]).chunk(2, -1)
        said = functional.linear(functional.silu(gate) * up, weights.down[expert])
        out += said * share[:, expert, None].to(x.dtype)
    return out
