"""One engine step as int32 tensors on the device. It computes nothing.

Rules: one upload per step; a token alone in its sequence is decoded, longer pieces are cut into tiles of consecutive
tokens; where a token's logits come from is the step's business, what they are is not.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from engines.bundled.batch import StepBatch
from engines.bundled.config import Int32
from engines.bundled.gpu.steps import cut_tiles
from engines.bundled.gpu.tensorcore.operators import Heads, Rows

Flags = npt.NDArray[np.bool_]


def lay_out(batch: StepBatch, heads: Heads, device: str, padded: int) -> tuple[Rows, torch.Tensor]:
    """The step's rows, `padded` of them, and the indices (W,) of the tokens whose logits are wanted."""
    counts = np.bincount(batch.sequence, minlength=len(batch.page_table))
    single = counts[batch.sequence] == 1
    alone = np.flatnonzero(single).astype(np.int32)
    tiles = longer_tiles(batch.sequence, single, heads.tile_tokens)
    longest = int(batch.position[alone].max()) + 1 if len(alone) else 1
    extra = padded - len(batch.token)
    if len(tiles):
        tiles = np.concatenate([tiles, padding_tiles(len(batch.token), padded, heads.tile_tokens)])
    else:
        alone = np.concatenate([alone, np.arange(len(batch.token), padded, dtype=np.int32)])
    token, sequence, position = (
        np.pad(ids, (0, extra), constant_values=fill)
        for ids, fill in ((batch.token, 0), (batch.sequence, 0), (batch.position, -1))
    )
    parts = [
        token, sequence, position, batch.wanted, alone, tiles[:, 0], tiles[:, 1],
        sequence[tiles[:, 0]], np.ascontiguousarray(batch.page_table).reshape(-1),
    ]  # fmt: skip
    tensors = upload(parts, device)
    rows = Rows(
        token=tensors[0], sequence=tensors[1], position=tensors[2], pages=tensors[8].view(batch.page_table.shape),
        alone=tensors[4], tile_token=tensors[5], tile_count=tensors[6], tile_sequence=tensors[7],
        pieces=longer_pieces(batch, single), chunks=padded_chunks(longest, heads.keys),
    )  # fmt: skip
    return rows, tensors[3]


def lay_out_tiles(batch: StepBatch, heads: Heads, tokens: int, pieces: int, pitch: int) -> list[Int32]:
    """The arrays of `PrefillGraphs`, padded to `tokens` tokens and `pieces` pieces: everything is cut into tiles."""
    tiles = np.array(cut_tiles(batch.sequence, heads.tile_tokens), np.int32).reshape(-1, 2)
    tiles = np.concatenate([tiles, padding_tiles(len(batch.token), tokens, heads.tile_tokens)])
    room = tokens // heads.tile_tokens + pieces + 1 - len(tiles)
    table = np.zeros((pieces, pitch), np.int32)
    table[: len(batch.page_table), : batch.page_table.shape[1]] = np.maximum(batch.page_table, 0)
    extra = tokens - len(batch.token)
    sequence = np.pad(batch.sequence, (0, extra))
    return [
        np.pad(batch.token, (0, extra)), sequence,
        np.pad(batch.position, (0, extra), constant_values=-1), np.pad(tiles[:, 0], (0, room)),
        np.pad(tiles[:, 1], (0, room)), np.pad(sequence[tiles[:, 0]], (0, room)),
        np.pad(batch.wanted, (0, pieces - len(batch.wanted))), table.reshape(-1),
    ]  # fmt: skip


def longer_tiles(sequence: Int32, single: Flags, most: int) -> Int32:
    """(P, 2) first token and tokens of each tile of the pieces that are longer than one token."""
    tiles = [tile for tile in cut_tiles(sequence, most) if not single[tile[0]]]
    return np.array(tiles, np.int32).reshape(-1, 2)


def padding_tiles(real: int, padded: int, most: int) -> Int32:
    """(P, 2) the same of rows of padding, which follow `real` rows."""
    tiles = [(first, min(most, padded - first)) for first in range(real, padded, most)]
    return np.array(tiles, np.int32).reshape(-1, 2)


def longer_pieces(batch: StepBatch, single: Flags) -> tuple[tuple[int, int, int], ...]:
    """First token, tokens and first position of each such piece."""
    pieces = cut_tiles(batch.sequence, len(batch.sequence))
    return tuple((first, count, int(batch.position[first])) for first, count in pieces if not single[first])


def padded_chunks(longest: int, keys: int) -> int:
    """Chunks of keys of the longest sequence, rounded up to a power of two."""
    return 1 << ((longest - 1) // keys).bit_length()


def upload(parts: list[Int32], device: str) -> list[torch.Tensor]:
    """The arrays as views of one tensor on the device, each at a multiple of 16 bytes."""
    return cut([part.size for part in parts], to_device(join(parts), device))


def to_device(array: Int32, device: str) -> torch.Tensor:
    """A copy on the device; the host does not wait for what the device still has to do."""
    return host(array, device).to(device, non_blocking=True)


def host(array: Int32, device: str) -> torch.Tensor:
    """The array as a tensor the device can fetch by itself: a copy in pinned memory."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    return tensor if device == "cpu" else tensor.pin_memory()


def join(parts: list[Int32]) -> Int32:
    """The arrays in one, each at a multiple of 16 bytes."""
    flat = np.zeros(sum(_room(part.size) for part in parts), np.int32)
    at = 0
    for part in parts:
        flat[at : at + part.size] = part
        at += _room(part.size)
    return flat


def cut(sizes: list[int], flat: torch.Tensor) -> list[torch.Tensor]:
    """Views of the parts of what `join` made."""
    starts = np.cumsum([0, *map(_room, sizes)]).tolist()
    return [flat[start : start + size] for start, size in zip(starts, sizes, strict=False)]


def _room(size: int) -> int:
    return -(-size // 4) * 4
