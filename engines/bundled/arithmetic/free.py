"""An order of sums that follows the step, as fast engines choose it: the control that has to fire.

It does not know kernels. Rules: fewer rows or more threads split K further, so that there is work for everyone; the
longest row of the step decides how attention splits its keys; `tuning` stands for an autotuner's choice. Every one
of these moves bits on every machine and at every model size.
"""

from __future__ import annotations

from engines.bundled.arithmetic.order import Order
from engines.bundled.config import ModelConfig

_KEYS_PER_SPLIT = 64  # the longest row is split about this many keys at a time, in multiples of 16


def free_order(config: ModelConfig, *, rows: int, longest: int, threads: int, tuning: int) -> Order:
    """The order of one step of `rows` tokens whose longest sequence has `longest` keys."""

    def width(columns: int) -> int:
        return split_width(columns, rows=rows, threads=threads, tuning=tuning)

    hidden = width(config.hidden_size)
    return Order(
        qkv=hidden,
        attention_out=width(config.num_attention_heads * config.head_dim),
        gate_up=hidden,
        down=width(config.intermediate_size),
        head=hidden,
        key_chunk=split_keys(longest, tuning=tuning),
        expert_down=width(config.moe_intermediate_size),
    )


def split_width(columns: int, *, rows: int, threads: int, tuning: int) -> int:
    """Width of a chunk of K: the whole of K for very many rows, a fraction of it for few."""
    splits = 7 * threads + 5 * tuning
    return max(1, columns * (rows + 1) // (rows + 1 + splits))


def split_keys(longest: int, *, tuning: int) -> int:
    """Keys of a chunk in attention: grows with the longest row of the step."""
    return 16 * (max(1, longest // _KEYS_PER_SPLIT) + tuning)
