"""Mixtures of experts on the GPU: where a layer's experts lie, the room a step needs, and the launches.

It computes nothing. Rules: the order of sums is the caller's; which pairs (token, expert) share a block is chosen here
for speed alone; nothing is read back to the host, so that a step can be a recorded graph.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from engines.bundled.arithmetic.order import Order
from engines.bundled.config import ModelConfig
from engines.bundled.errors import NotSupported
from engines.bundled.gpu.interface import Launch
from engines.bundled.gpu.operators import FEW_THREADS, MOST_SHARED, padded

SHARED_ROWS = 8  # pairs of one expert in a block, where there are many pairs
FEW_PAIRS = 32  # up to here each pair has blocks of its own


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuExperts:
    """Addresses of one layer's router and of its experts, one packed matrix after the other."""

    router: int
    gate_up: int
    down: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertBuffers:
    """Addresses for the pairs of up to so many tokens as `sizes` was asked for."""

    router: int
    expert: int
    weight: int
    tile_expert: int
    tile_pair: int
    gate_up: int
    gated: int
    said: int

    def addresses(self) -> tuple[int, ...]:
        """All of them."""
        return tuple(getattr(self, field.name) for field in fields(self))


def sizes(model: ModelConfig, tokens: int) -> dict[str, int]:
    """Words of each buffer of `ExpertBuffers`."""
    pairs, inner = tokens * model.num_experts_per_tok, model.moe_intermediate_size
    tiles = most_tiles(pairs, model)
    return {
        "router": tokens * model.num_experts,
        "expert": pairs,
        "weight": pairs,
        "tile_expert": tiles,
        "tile_pair": tiles * SHARED_ROWS,
        "gate_up": pairs * 2 * inner,
        "gated": pairs * inner,
        "said": pairs * model.hidden_size,
    }


def most_tiles(pairs: int, model: ModelConfig) -> int:
    """Tiles of SHARED_ROWS pairs of one expert: every expert may leave one half empty."""
    return -(-pairs // SHARED_ROWS) + model.num_experts


def matrix_words(outputs: int, inputs: int) -> int:
    """Words from one expert's packed matrix to the next."""
    return padded(outputs) * inputs


def launches(
    model: ModelConfig, layer: GpuExperts, b: ExpertBuffers, order: Order, normed: int, hidden: int, tokens: int
) -> list[Launch]:
    """From router logits in `b.router` and the normed rows to `hidden` with the mix added.

    Raises:
        NotSupported: more chunks along K than a block can add.
    """
    k, inner, width = model.num_experts_per_tok, model.moe_intermediate_size, model.hidden_size
    pairs = tokens * k
    rows = 1 if pairs <= FEW_PAIRS else SHARED_ROWS
    gate_up = _product(b, normed, layer.gate_up, b.gate_up, 2 * inner, width, order.gate_up, k)
    down = _product(b, b.gated, layer.down, b.said, width, inner, order.expert_down, 1)
    if not (_fits(gate_up, rows) and _fits(down, rows)):
        rows = 1
    tiles = pairs if rows == 1 else most_tiles(pairs, model)
    return [
        _route(model, b, tokens),
        *([] if rows == 1 else [_group(model, b, pairs, tiles)]),
        _launch(gate_up, rows, tiles),
        _gate(b, pairs, inner),
        _launch(down, rows, tiles),
        Launch(
            kernel="mix_experts", grid=(tokens, 1, 1), block=128, shared=0,
            arguments={"said": b.said, "weight": b.weight, "hidden": hidden, "k": k},
        ),
    ]  # fmt: skip


def _route(model: ModelConfig, b: ExpertBuffers, tokens: int) -> Launch:
    arguments = {
        "logits": b.router, "expert": b.expert, "weight": b.weight,
        "experts": model.num_experts, "k": model.num_experts_per_tok,
    }  # fmt: skip
    shared = 4 * (2 * model.num_experts + 2)
    return Launch(kernel="route", grid=(tokens, 1, 1), block=128, shared=shared, arguments=arguments)


def _group(model: ModelConfig, b: ExpertBuffers, pairs: int, tiles: int) -> Launch:
    arguments = {
        "expert": b.expert, "tile_expert": b.tile_expert, "tile_pair": b.tile_pair,
        "pairs": pairs, "experts": model.num_experts, "rows": SHARED_ROWS, "tiles": tiles,
    }  # fmt: skip
    shared = 4 * (model.num_experts + 1)
    return Launch(kernel="group_pairs", grid=(1, 1, 1), block=256, shared=shared, arguments=arguments)


def _gate(b: ExpertBuffers, pairs: int, inner: int) -> Launch:
    arguments = {"gate_up": b.gate_up, "out": b.gated, "pairs": pairs, "inner": inner}
    blocks = min(-(-pairs * inner // 256), 4096)
    return Launch(kernel="swiglu_pairs", grid=(blocks, 1, 1), block=256, shared=0, arguments=arguments)


def _product(
    b: ExpertBuffers, x: int, weight: int, out: int, outputs: int, inputs: int, width: int, fan: int
) -> dict[str, int]:
    """Arguments of `expert_rows_*`, with as many groups of eight columns in a block as its threads allow."""
    chunks, share = -(-inputs // width), 8
    while share > 1 and 8 * share * chunks > FEW_THREADS:
        share //= 2
    return {
        "x": x, "weight": weight, "out": out, "expert": b.expert, "tile_expert": b.tile_expert,
        "tile_pair": b.tile_pair, "N": outputs, "K": inputs, "width": width, "share": share, "fan": fan,
        "stride": matrix_words(outputs, inputs),
    }  # fmt: skip


def _shared(arguments: dict[str, int], rows: int) -> int:
    chunks = -(-arguments["K"] // arguments["width"])
    return 4 * rows * chunks * (arguments["width"] + 4 + 8 * arguments["share"])


def _fits(arguments: dict[str, int], rows: int) -> bool:
    return _shared(arguments, rows) <= MOST_SHARED


def _launch(arguments: dict[str, int], rows: int, tiles: int) -> Launch:
    chunks, share = -(-arguments["K"] // arguments["width"]), arguments["share"]
    if 8 * share * chunks > FEW_THREADS or not _fits(arguments, rows):
        raise NotSupported(f"{chunks} chunks along K of an expert are more than the GPU kernels add; use device=cpu")
    return Launch(
        kernel=f"expert_rows_{rows}",
        grid=(padded(arguments["N"]) // (8 * share), tiles, 1),
        block=8 * share * chunks,
        shared=_shared(arguments, rows),
        arguments=arguments,
        overlap=rows == 1,
    )
