"""The operators of `tensorcore` on torch tensors: each launches its kernels and returns a fresh tensor.

They know no model and no step. Rules: the grid follows the rows, what a program computes does not; the matrix product
is in `linear.py`, everything else here has one form.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton

from engines.bundled.config import ModelConfig
from engines.bundled.gpu.tensorcore import kernels
from engines.bundled.gpu.tensorcore.linear import shared_bytes

Tensor = torch.Tensor
KEYS = 128  # keys of a chunk, by absolute position
ROWS = 128  # query rows of a prefill tile
PREFILL_WARPS, PREFILL_STAGES, DECODE_WARPS = 8, 2, 4  # the fastest of `gpu_matmul.py --sweep`; no bit moves
BEST_BLOCK = 4096
WIDE_SHARED = 172032  # bytes that a prefill tile of head dimension 128 takes with two stages
MERGED = 4  # chunks whose loads are under way at once
_SWIGLU_BLOCK = 1024


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rows:
    """The tokens of a step on the device, int32. Position -1 is a row of padding."""

    token: Tensor  # (T,) ids
    sequence: Tensor  # (T,) rows of `pages`
    position: Tensor  # (T,)
    pages: Tensor  # (S, pitch)
    alone: Tensor  # (D,) indices of tokens that are alone in their sequence
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
        return ROWS // self.group

    @property
    def scale(self) -> float:
        """Of scores, for exponentials to base 2."""
        return 1.4426950408889634 / math.sqrt(self.dim)


def heads_of(config: ModelConfig, page: int, keys: int = KEYS) -> Heads:
    """The attention shape of a model."""
    return Heads(
        heads=config.num_attention_heads, kv=config.num_key_value_heads, dim=config.head_dim, page=page, keys=keys
    )


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


def attend(qkv: Tensor, rows: Rows, cache: tuple[Tensor, Tensor], heads: Heads, window: int = 0) -> Tensor:
    """(T, heads x dim): every token over the newest `window` keys of its own sequence up to itself; 0: all."""
    out = torch.zeros((len(qkv), heads.heads * heads.dim), dtype=qkv.dtype, device=qkv.device)
    if len(rows.alone):
        _attend_alone(qkv, rows, cache, heads, window, out)
    if len(rows.tile_token):
        kernels.prefill_kernel[(len(rows.tile_token), heads.kv)](
            qkv, rows.tile_token, rows.tile_count, rows.tile_sequence, rows.position, rows.pages, *cache, out,
            heads.scale, rows.pages.shape[1], HEADS=heads.heads, KV=heads.kv, DIM=heads.dim, BD=heads.block,
            PAGE=heads.page, KEYS=heads.keys, PADDED=heads.group, ROWS=ROWS, WINDOW=window,
            num_warps=PREFILL_WARPS, num_stages=PREFILL_STAGES if shared_bytes(qkv.device) >= WIDE_SHARED else 1,
            enable_fp_fusion=False,
        )  # fmt: skip
    return out


def _attend_alone(
    qkv: Tensor, rows: Rows, cache: tuple[Tensor, Tensor], heads: Heads, window: int, out: Tensor
) -> None:
    count, chunks = len(rows.alone), rows.chunks
    kind: dict[str, object] = {"dtype": torch.float32, "device": qkv.device}
    tops, totals = (torch.empty((count, heads.heads, chunks), **kind) for _ in range(2))  # type: ignore[call-overload]
    outs = torch.empty((count, heads.heads, chunks, heads.dim), dtype=torch.float32, device=qkv.device)
    kernels.decode_chunk_kernel[(count, heads.kv, chunks)](
        qkv, rows.alone, rows.sequence, rows.position, rows.pages, *cache, tops, totals, outs, heads.scale,
        rows.pages.shape[1], chunks, HEADS=heads.heads, KV=heads.kv, DIM=heads.dim, BD=heads.block, PAGE=heads.page,
        KEYS=heads.keys, PADDED=max(16, heads.group), WINDOW=window, num_warps=DECODE_WARPS, num_stages=1,
        enable_fp_fusion=False,
    )  # fmt: skip
    kernels.decode_merge_kernel[(count, heads.heads)](
        rows.alone, rows.position, tops, totals, outs, out, chunks,
        HEADS=heads.heads, DIM=heads.dim, BD=heads.block, KEYS=heads.keys, UNROLL=MERGED, WINDOW=window,
        num_warps=1, enable_fp_fusion=False,
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
