"""The operators of `tensorcore` on torch tensors: each launches its kernels and returns a fresh tensor.

They know no model and no step. Rules: the grid follows the rows, what a program computes does not; the matrix product
is in `linear.py`, attention in `attention.py`, everything else here has one form.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton

from engines.bundled.config import ModelConfig
from engines.bundled.gpu.tensorcore import kernels
from engines.bundled.gpu.tensorcore.tiles import FORM, Form

Tensor = torch.Tensor
KEYS = FORM.keys  # of a split, by absolute position
BEST_BLOCK = 4096
_SWIGLU_BLOCK = 1024


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rows:
    """The tokens of a step on the device, int32. Position -1 is a row of padding."""

    token: Tensor  # (T,) ids
    sequence: Tensor  # (T,) rows of `pages`
    position: Tensor  # (T,)
    pages: Tensor  # (S, pitch)
    alone: Tensor  # (D,) indices of tokens that are alone in their sequence; with the tiles, of every token
    tile_token: Tensor  # (P,) first token of each prefill tile
    tile_count: Tensor  # (P,)
    tile_sequence: Tensor  # (P,)
    pieces: tuple[tuple[int, int, int], ...]  # on the host: first token, tokens and position of each longer piece
    chunks: int  # of KEYS keys that the longest sequence of `alone` may have, or more


@dataclass(frozen=True, slots=True, kw_only=True)
class Heads:
    """The attention shape of a model and its pages."""

    heads: int
    kv: int
    dim: int
    page: int
    keys: int = KEYS
    form: Form = FORM

    @property
    def group(self) -> int:
        """Query heads per KV head, padded to a power of two."""
        return 1 << (self.heads // self.kv - 1).bit_length()

    @property
    def block(self) -> int:
        """The head dimension, padded likewise."""
        return 1 << (self.dim - 1).bit_length()

    @property
    def tile_tokens(self) -> int:
        """Tokens of a prefill tile."""
        return self.form.rows // self.group

    @property
    def scale(self) -> float:
        """Of scores, for exponentials to base 2."""
        return 1.4426950408889634 / math.sqrt(self.dim)


def heads_of(config: ModelConfig, page: int, keys: int = KEYS) -> Heads:
    """The attention shape of a model."""
    return Heads(
        heads=config.num_attention_heads, kv=config.num_key_value_heads, dim=config.head_dim, page=page, keys=keys,
        form=FORM,
    )  # fmt: skip


def norm(hidden: Tensor, gain: Tensor, eps: float, update: Tensor | None = None) -> Tensor:
    """RMSNorm of hidden (T, K); `update` is added to hidden, in place, before."""
    columns = hidden.shape[1]
    out = torch.empty_like(hidden)
    if len(out):
        kernels.norm_kernel[(len(out),)](
            hidden, hidden if update is None else update, gain, out, eps,
            K=columns, BLOCK=triton.next_power_of_2(columns), ADD=update is not None, num_warps=4,
        )  # fmt: skip
    return out


def rope(
    qkv: Tensor, table: Tensor, rows: Rows, cache: tuple[Tensor, Tensor], heads: Heads,
    gains: tuple[Tensor, Tensor] | None, eps: float,
) -> None:  # fmt: skip
    """Norms (where the model has them) and turns q in place and k, and stores k and v in their pages."""
    q_gain, k_gain = gains if gains is not None else (qkv, qkv)
    kernels.rope_kernel[(len(qkv), heads.heads + 2 * heads.kv)](
        qkv, table, rows.sequence, rows.position, rows.pages, *cache, q_gain, k_gain, eps, rows.pages.shape[1],
        HEADS=heads.heads, KV=heads.kv, DIM=heads.dim, HALF=heads.block // 2, PAGE=heads.page, NORM=gains is not None,
        num_warps=1,
    )  # fmt: skip


def swiglu(gate_up: Tensor) -> Tensor:
    """(T, inner) from (T, 2 inner)."""
    inner = gate_up.shape[1] // 2
    out = torch.empty((len(gate_up), inner), dtype=gate_up.dtype, device=gate_up.device)
    kernels.swiglu_kernel[(len(gate_up), triton.cdiv(inner, _SWIGLU_BLOCK))](
        gate_up, out, INNER=inner, BLOCK=_SWIGLU_BLOCK, num_warps=4
    )
    return out


def pick(logits: Tensor, token: Tensor, position: Tensor | None = None) -> None:
    """Writes each row's argmax (lowest id among equals; -1: a logit is no finite number) to token (W,) int32.

    With `position` (W,), rows move on to their next position.
    """
    count, vocab = logits.shape
    parts = triton.cdiv(vocab, BEST_BLOCK)
    best = torch.empty((count, parts), dtype=torch.float32, device=logits.device)
    where, bad = (torch.empty((count, parts), dtype=torch.int32, device=logits.device) for _ in range(2))
    kernels.best_kernel[(count, parts)](
        logits, best, where, bad, VOCAB=vocab, PARTS=parts, BLOCK=BEST_BLOCK, num_warps=4
    )
    kernels.pick_kernel[(count,)](
        best, where, bad, token, token if position is None else position, ADVANCE=position is not None, VOCAB=vocab,
        PARTS=parts, BLOCK=triton.next_power_of_2(parts), num_warps=1,
    )  # fmt: skip
