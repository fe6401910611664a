"""The order of sums of one step: how wide the chunks are that T adds. It does not know kernels.

Rules: `portable` takes it from the model alone; what else may move it lives in `free`.
"""

from __future__ import annotations

from dataclasses import dataclass

from engines.bundled.config import ModelConfig

DEFINITION = 1  # version of docs/numerics.md that `portable` computes
KEY_CHUNK = 256  # keys of a chunk in attention, by absolute position


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """Chunk widths along K of each matrix, and keys per chunk in attention (a multiple of 16)."""

    qkv: int
    attention_out: int
    gate_up: int
    down: int
    head: int
    key_chunk: int
    expert_down: int = 0  # chunk width of an expert's inner width; 0: no experts


def portable_order(config: ModelConfig) -> Order:
    """The one order of the written definition."""
    width = config.chunk_width
    return Order(
        qkv=width, attention_out=width, gate_up=width, down=width, head=width, key_chunk=KEY_CHUNK, expert_down=width
    )
