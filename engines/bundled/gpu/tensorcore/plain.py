"""Operators as plain torch has them, in bfloat16: F.linear, rms_norm, silu, scaled_dot_product_attention. No promise.

They know no definition. Rules: tokens alone in their sequence attend together over gathered pages, padded to the
longest as batched engines do; a longer piece of a prompt attends by itself; nothing here reads the device back, so that
a decode step can be a CUDA graph.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

from engines.bundled.gpu.tensorcore.experts import ExpertWeights, run_plain_experts
from engines.bundled.gpu.tensorcore.linear import Linear, Plain
from engines.bundled.gpu.tensorcore.operators import Heads, Rows
from engines.bundled.gpu.tensorcore.passes import Cache
from engines.bundled.gpu.tensorcore.weights import Layer

Tensor = torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlainOperators:
    """torch's own. `table` holds cosines and sines (positions, dim)."""

    heads: Heads
    table: Tensor
    eps: float
    linear: Linear = Plain()  # noqa: RUF009 - stateless
    shared: Linear = Plain()  # noqa: RUF009

    def norm(self, hidden: Tensor, gain: Tensor, update: Tensor | None = None) -> Tensor:
        """torch's rms_norm."""
        if update is not None:
            hidden += update
        return functional.rms_norm(hidden, (hidden.shape[1],), gain, self.eps)

    def swiglu(self, gate_up: Tensor) -> Tensor:
        """silu(gate) * up."""
        gate, up = gate_up.chunk(2, -1)
        return functional.silu(gate) * up

    def experts(self, x: Tensor, weights: ExpertWeights) -> Tensor:
        """torch's products, every expert for every row."""
        return run_plain_experts(x, functional.linear(x, weights.router), weights)

    def attention(self, qkv: Tensor, rows: Rows, cache: Cache, layer: Layer) -> Tensor:
        """Rope, store, and one or more calls of scaled_dot_product_attention."""
        h = self.heads
        q, k, v = torch.split(qkv.view(len(qkv), -1, h.dim), [h.heads, h.kv, h.kv], 1)
        if layer.head_norms is not None:
            q, k = (
                functional.rms_norm(x, (h.dim,), g, self.eps) for x, g in zip((q, k), layer.head_norms, strict=True)
            )
        place = rows.position.clamp(min=0).long()
        q, k = self._rotate(q, place), self._rotate(k, place)
        page = rows.pages[rows.sequence.long(), place // h.page].long()
        # Padding rows write where the first row writes; the pool's last slot is theirs to spoil.
        slot = torch.where(rows.position >= 0, page * h.page + place % h.page, len(cache[0]) - 1)
        cache[0].index_copy_(0, slot, k)
        cache[1].index_copy_(0, slot, v)
        out = torch.zeros_like(q)
        if len(rows.alone):
            index = rows.alone.long()
            out.index_copy_(0, index, self._attend_alone(q.index_select(0, index), rows, cache, index, layer.window))
        for first, count, start in rows.pieces:
            piece = slice(first, first + count)
            out[piece] = self._attend_piece(q[piece], rows, cache, first, start, layer.window)
        return out.view(len(qkv), -1)

    def _rotate(self, x: Tensor, place: Tensor) -> Tensor:
        half = self.heads.dim // 2
        cosine, sine = self.table.index_select(0, place).unsqueeze(1).chunk(2, -1)
        a, b = x[..., :half].float(), x[..., half:].float()
        return torch.cat([a * cosine - b * sine, b * cosine + a * sine], -1).to(x.dtype)

    def _attend_alone(self, q: Tensor, rows: Rows, cache: Cache, index: Tensor, window: int) -> Tensor:
        h = self.heads
        longest = rows.chunks * h.keys
        pages = rows.pages.index_select(0, rows.sequence.index_select(0, index).long())
        at = torch.arange(longest, device=q.device)
        wide = (at // h.page).clamp(max=pages.shape[1] - 1)
        slots = (pages.index_select(1, wide).long().clamp(min=0) * h.page + at % h.page).clamp(max=len(cache[0]) - 1)
        place = rows.position.index_select(0, index)[:, None]
        seen = at[None] <= place
        if window:
            seen &= at[None] > place - window
        keys, values = (pool[slots].transpose(1, 2) for pool in cache)
        mask = (seen | (at[None] == 0) & (place < 0))[:, None, None]  # a padding row sees something, to stay a number
        grouped = q.view(len(q), h.kv, -1, h.dim)  # a group's heads as queries: no copy of keys and values per head
        return functional.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask).reshape(q.shape)

    def _attend_piece(self, q: Tensor, rows: Rows, cache: Cache, first: int, start: int, window: int) -> Tensor:
        h, count = self.heads, len(q)
        at = torch.arange(start + count, device=q.device)
        own = rows.pages[rows.sequence[first].long()]
        slots = own[at // h.page].long() * h.page + at % h.page
        keys, values = (pool[slots].transpose(0, 1)[None] for pool in cache)
        narrow, mask = 0 < window < start + count, None
        if start or narrow:
            place = (start + torch.arange(count, device=q.device))[:, None]
            mask = at[None] <= place
            if narrow:
                mask &= at[None] > place - window
        out = functional.scaled_dot_product_attention(
            q.transpose(0, 1)[None], keys, values, attn_mask=mask, is_causal=mask is None, enable_gqa=True
        )
        return out[0].transpose(0, 1)
