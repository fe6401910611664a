"""The operators as a user of torch calls them. It keeps no promise about bits."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
from torch.nn import functional

from engines.ops.interface import AttentionFunction, Bits, Float32, Heads, Piece, RowFunction

DTYPES = ("float32", "bfloat16", "float16")
SURVEYED = ("float32", "bfloat16")  # where nobody asks


class TorchOperators:
    """torch on the CPU."""

    def __init__(self, dtype: str, threads: int) -> None:
        self._dtype: torch.dtype = getattr(torch, dtype)
        torch.set_num_threads(threads)

    def _in(self, array: Float32) -> torch.Tensor:
        return torch.tensor(array).to(self._dtype)

    def _out(self, tensor: torch.Tensor) -> Bits:
        kind = torch.int32 if self._dtype == torch.float32 else torch.int16
        bits: Bits = tensor.contiguous().view(kind).numpy()
        return bits

    def linear(self, weight: Float32) -> RowFunction:
        w = self._in(weight)
        return lambda x: self._out(functional.linear(self._in(x), w))

    def rms_norm(self, gain: Float32, eps: float) -> RowFunction:
        g = self._in(gain)
        return lambda x: self._out(functional.rms_norm(self._in(x), g.shape, g, eps))

    def log_softmax(self) -> RowFunction:
        return lambda x: self._out(torch.log_softmax(self._in(x), -1))

    def swiglu(self) -> RowFunction:
        def run(x: Float32) -> Bits:
            gate, up = self._in(x).chunk(2, -1)
            return self._out(functional.silu(gate) * up)

        return run

    def rope(self, heads: Heads, position: int) -> RowFunction:
        half = heads.dim // 2
        frequency = 1.0 / (10000.0 ** (torch.arange(0, heads.dim, 2).float() / heads.dim))

        def run(x: Float32) -> Bits:
            angle = torch.full((len(x), 1, 1), float(position)) * frequency
            cosine, sine = (torch.cat([f(angle)] * 2, -1).to(self._dtype) for f in (torch.cos, torch.sin))
            y = self._in(x).view(len(x), -1, heads.dim)
            turned = torch.cat([-y[..., half:], y[..., :half]], -1)
            return self._out((y * cosine + turned * sine).reshape(len(x), -1))

        return run

    def attention(self, heads: Heads, sequences: Sequence[Float32]) -> AttentionFunction:
        """Sequences with one token each are padded to the longest, with a mask; a longer piece runs alone, causally."""
        cut = [heads.heads, heads.kv_heads, heads.kv_heads]
        parts = [torch.split(self._in(s).view(len(s), -1, heads.dim), cut, 1) for s in sequences]

        @lru_cache(maxsize=1)
        def prepare(pieces: tuple[Piece, ...]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
            longest = max(piece.keys for piece in pieces)
            queries = [parts[i][0][piece.keys - piece.tokens : piece.keys] for i, piece in enumerate(pieces)]
            keys, values = (
                torch.stack(
                    [
                        functional.pad(parts[i][part][: piece.keys], (0, 0, 0, 0, 0, longest - piece.keys))
                        for i, piece in enumerate(pieces)
                    ]
                ).transpose(1, 2)
                for part in (1, 2)
            )
            return torch.stack(queries).transpose(1, 2), keys, values, _mask(pieces, longest)

        def run(pieces: Sequence[Piece]) -> Bits:
            query, keys, values, mask = prepare(tuple(pieces))
            out = functional.scaled_dot_product_attention(query, keys, values, attn_mask=mask, enable_gqa=True)
            return self._out(out[0, :, -1].reshape(-1))

        return run

    def experts(self, router: Float32, experts: Sequence[tuple[Float32, Float32]], per_token: int) -> RowFunction:
        route = self._in(router)
        weights = [(self._in(gate_up), self._in(down)) for gate_up, down in experts]

        def run(array: Float32) -> Bits:
            x = self._in(array)
            weight, chosen = torch.topk(torch.softmax(functional.linear(x, route), -1), per_token, dim=-1)
            weight = weight / weight.sum(-1, keepdim=True)
            out = torch.zeros_like(x)
            for index, (gate_up, down) in enumerate(weights):
                row, slot = torch.where(chosen == index)
                if len(row):
                    gate, up = functional.linear(x[row], gate_up).chunk(2, -1)
                    said = functional.linear(functional.silu(gate) * up, down)
                    out.index_add_(0, row, said * weight[row, slot, None])
            return self._out(out)

        return run


def _mask(pieces: Sequence[Piece], longest: int) -> torch.Tensor | None:
    """(S, 1, T, keys), true where a token sees a key; None where every token sees every key."""
    tokens = pieces[0].tokens
    keys = torch.tensor(np.array([piece.keys for piece in pieces]))
    last = keys[:, None] - tokens + torch.arange(tokens)  # position of each token
    seen = torch.arange(longest) <= last[..., None]
    return None if bool(seen.all()) else seen[:, None]
