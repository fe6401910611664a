"""Paged attention on torch tensors: decode in splits of keys and their merge, and prefill in tiles.

It knows no model and no step. Rules: the grid follows the rows, what a program computes does not; every row of the
result is written, rows of padding with zeros.
"""

from __future__ import annotations

import torch

from engines.bundled.gpu.tensorcore import attention_kernels as kernels
from engines.bundled.gpu.tensorcore.linear import shared_bytes
from engines.bundled.gpu.tensorcore.operators import Heads, Rows
from engines.bundled.gpu.tensorcore.tiles import fit_stages

Tensor = torch.Tensor
LEAST_ROWS = 16  # of a matrix unit's product


def attend(qkv: Tensor, rows: Rows, cache: tuple[Tensor, Tensor], heads: Heads, window: int = 0) -> Tensor:
    """(T, heads x dim): every token over the newest `window` keys of its own sequence up to itself; 0: all.

    Every token of `qkv` (T, (heads + 2 kv) x dim) is in `rows.alone` or in one of its tiles.
    """
    out = torch.empty((len(qkv), heads.heads * heads.dim), dtype=qkv.dtype, device=qkv.device)
    if len(rows.alone):
        _attend_alone(qkv, rows, cache, heads, window, out)
    if len(rows.tile_token):
        _attend_tiles(qkv, rows, cache, heads, window, out)
    return out


def _shape(heads: Heads, window: int) -> dict[str, int]:
    step = min(heads.form.step, heads.keys)
    return {
        "HEADS": heads.heads, "KV": heads.kv, "DIM": heads.dim, "BD": heads.block, "PAGE": heads.page,
        "KEYS": heads.keys, "STEP": step, "LEVELS": step.bit_length() - 1, "WINDOW": window,
    }  # fmt: skip


def _stages(stages: int, heads: Heads, rows: int, device: torch.device) -> int:
    return fit_stages(stages, step=heads.form.step, block=heads.block, rows=rows, shared=shared_bytes(device))


def _attend_tiles(
    qkv: Tensor, rows: Rows, cache: tuple[Tensor, Tensor], heads: Heads, window: int, out: Tensor
) -> None:
    form, tiles = heads.form, len(rows.tile_token)
    kernels.prefill_kernel[(tiles * heads.kv,)](
        qkv, rows.tile_token, rows.tile_count, rows.tile_sequence, rows.position, rows.pages, *cache, out,
        heads.scale, rows.pages.shape[1], tiles, **_shape(heads, window), PADDED=heads.group, ROWS=form.rows,
        num_warps=form.prefill_warps, num_stages=_stages(form.prefill_stages, heads, form.rows, qkv.device),
        enable_fp_fusion=False,
    )  # fmt: skip


def _attend_alone(
    qkv: Tensor, rows: Rows, cache: tuple[Tensor, Tensor], heads: Heads, window: int, out: Tensor
) -> None:
    form, count, splits, shape = heads.form, len(rows.alone), rows.chunks, _shape(heads, window)
    whole = splits == 1  # nothing to merge
    kept = 0 if whole else count * heads.heads * splits
    tops, totals = (torch.empty(kept, dtype=torch.float32, device=qkv.device) for _ in range(2))
    outs = torch.empty(kept * heads.dim, dtype=torch.float32, device=qkv.device)
    padded = max(LEAST_ROWS, heads.group)
    kernels.decode_kernel[(heads.kv, splits, count)](
        qkv, rows.alone, rows.sequence, rows.position, rows.pages, *cache, tops, totals, outs, out, heads.scale,
        rows.pages.shape[1], splits, **shape, PADDED=padded, WHOLE=whole, num_warps=form.decode_warps,
        num_stages=_stages(form.decode_stages, heads, padded, qkv.device), enable_fp_fusion=False,
    )  # fmt: skip
    if not whole:
        kernels.decode_merge_kernel[(heads.heads, count)](
            rows.alone, rows.position, tops, totals, outs, out, heads.scale, splits, HEADS=heads.heads, DIM=heads.dim,
            BD=heads.block, KEYS=heads.keys, UNROLL=form.merged, WINDOW=window, num_warps=1, enable_fp_fusion=False,
        )  # fmt: skip
