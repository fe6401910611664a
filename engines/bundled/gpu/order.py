"""Orders of sums that follow the step on the GPU: the control that has to fire there.

It does not know kernels. Rules: as in `arithmetic.free`, fewer rows split K further and the longest row decides how
attention splits its keys, `tuning` stands for an autotuner's choice; in multiples of 16, as the GPU kernels need.
"""

from __future__ import annotations

from engines.bundled.arithmetic.order import Order
from engines.bundled.config import ModelConfig

_MOST_SPLITS = 16
_MOST_KEYS = 256  # keys of a chunk that a block can take


def free_order(config: ModelConfig, *, rows: int, longest: int, tuning: int) -> Order:
    """The order of one step of `rows` tokens whose longest sequence has `longest` keys."""

    def width(columns: int) -> int:
        return split_width(columns, rows=rows, tuning=tuning)

    hidden = width(config.hidden_size)
    return Order(
        qkv=hidden,
        attention_out=width(config.num_attention_heads * config.head_dim),
        gate_up=hidden,
        down=width(config.intermediate_size),
        head=hidden,
        key_chunk=split_keys(longest, tuning=tuning),
        expert_down=width(config.moe_intermediate_size) if config.num_experts else 0,
    )


def split_width(columns: int, *, rows: int, tuning: int) -> int:
    """Width of a chunk of K: a sixteenth of K for one row, the whole of it for very many."""
    splits = max(1, _MOST_SPLITS // (1 + rows // 2) + tuning) if rows < 2 * _MOST_SPLITS else 1 + tuning
    steps = columns // 16
    return 16 * max(1, -(-steps // min(splits, steps)))


def split_keys(longest: int, *, tuning: int) -> int:
    """Keys of a chunk in attention: grows with the longest row of the step, within what a block can take."""
    return min(16 * (max(1, longest // 64) + tuning), _MOST_KEYS)
