"""What is reported of rows of logits that lie on the device: candidates in order, log-softmax, finiteness.

It knows no requests. Rules: what a row gives depends on the row alone, and has the bits of the CPU's kernels of the
written definition: largest first, lowest id among equals; the logprob of a token is (logit - largest) - logarithm.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
import triton

from engines.bundled.config import Float32, Int32
from engines.bundled.gpu.tensorcore import softmax_kernels as kernels
from engines.bundled.kernels.interface import SamplerKernels
from engines.bundled.logits import Asked

Tensor = torch.Tensor
_KEY_BLOCK = 4096
_CHUNK = 768
ROWS_AT_ONCE = 64  # keys of so many rows are made at a time: 78 MB at 151,936 ids
_HELD = 8  # chunks of ids that one program adds


class Summary(NamedTuple):
    """Of W rows of logits, on the host."""

    bad: Int32  # (W,) logits that are no finite numbers
    ids: Int32  # (W, k) of the largest, in order
    values: Float32  # (W, k)
    asked: Float32  # (W,) the logit of the id that was asked for
    logarithm: Float32  # (W,) log of the sum of exp(logit - largest); NaN if nobody asked

    def logprobs(self, row: int, values: Float32) -> Float32:
        """Of ids with these logits."""
        found: Float32 = (values - self.values[row, 0]) - self.logarithm[row]
        return found


def summarise(logits: Tensor, k: int, asked: Int32, *, softmax: bool) -> Summary:
    """Of logits (W, V): the k largest, at least one, and the logits of `asked` (W,)."""
    most = max(k, 1)
    wanted = torch.from_numpy(asked.astype(np.int64)).to(logits.device)
    parts = [
        _words(rows, most, ids, softmax=softmax)
        for rows, ids in zip(torch.split(logits, ROWS_AT_ONCE), torch.split(wanted, ROWS_AT_ONCE), strict=True)
    ]
    words = torch.cat(parts).cpu().numpy()
    floats = np.ascontiguousarray(words[:, 1 + most :]).view(np.float32)
    return Summary(
        bad=words[:, 0], ids=words[:, 1 : 1 + most], values=floats[:, :most], asked=floats[:, most],
        logarithm=floats[:, most + 1],
    )  # fmt: skip


def _words(logits: Tensor, most: int, asked: Tensor, *, softmax: bool) -> Tensor:
    """(W, 3 + 2 most) int32: a row's summary, floats as their bits."""
    keys, bad = order(logits)
    top = torch.topk(keys, most, dim=1).values
    values, at = numbers(top >> 32), logits.gather(1, asked[:, None]).float()
    logarithm = log_sums(logits, values[:, 0].contiguous()) if softmax else torch.full_like(at[:, 0], torch.nan)
    ids = (0x7FFFFFFF - (top & 0x7FFFFFFF)).int()
    floats = (x.view(torch.int32) for x in (values, at, logarithm[:, None]))
    return torch.cat([bad.sum(1, keepdim=True, dtype=torch.int32), ids, *floats], 1)


class CardLogits:
    """A step's logits (W, vocab) on the device; they hold until the next step."""

    def __init__(self, logits: Tensor, asked: Asked, kernels: SamplerKernels) -> None:
        self.shape = (logits.shape[0], logits.shape[1])
        self.logits, self.kernels, self.ids = logits, kernels, asked.ids
        self.summary: Summary | None = None
        if len(logits):
            with torch.inference_mode():
                k = min(asked.most, logits.shape[1])
                self.summary = summarise(logits, k, asked.ids, softmax=asked.softmax)

    def first_bad(self) -> int:
        """The first row that holds a NaN or an infinity, or -1."""
        if self.summary is None or not self.summary.bad.any():
            return -1
        return int(np.argmax(self.summary.bad > 0))

    def row(self, index: int) -> CardRow:
        """One row. Raises IndexError for one there is not."""
        if self.summary is None:
            raise IndexError("a step without logits")
        return CardRow(self, self.summary, index)


class CardRow:
    """One row of them. What the summary lacks comes from the whole row, which is fetched once."""

    whole = False

    def __init__(self, step: CardLogits, summary: Summary, index: int) -> None:
        self._step, self._summary, self._index = step, summary, index
        self._fetched: Float32 | None = None

    def logits(self) -> Float32:
        """(vocab,) float32."""
        if self._fetched is None:
            self._fetched = self._step.logits[self._index].float().cpu().numpy()
        return self._fetched

    def top(self, k: int) -> Int32:
        """(k,) ids of the largest, in order; all there are, if these are fewer."""
        found: Int32 = self._summary.ids[self._index]
        k = min(k, self._step.shape[1])
        if k > len(found):
            found = self._step.kernels.top_k(self.logits()[np.newaxis], k)[0]
        return found[:k]

    def values(self, ids: Int32) -> Float32:
        """(n,) logits of these ids."""
        known = {int(self._step.ids[self._index]): self._summary.asked[self._index]}
        # Candidates, whose -0.0 is 0.0 as that of the largest is, come last: the largest less itself is +0.0.
        known |= zip(self._summary.ids[self._index].tolist(), self._summary.values[self._index], strict=True)
        if all(number in known for number in ids.tolist()):
            return np.array([known[number] for number in ids.tolist()], np.float32)
        found: Float32 = self.logits()[ids]
        return found

    def logprobs(self, ids: Int32) -> Float32:
        """(n,) log-probabilities of these ids."""
        return self._summary.logprobs(self._index, self.values(ids))


def order(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Keys (W, V) int64 that sort as the logits do, all different, and how many of each part are no finite numbers."""
    count, vocab = logits.shape
    parts = triton.cdiv(vocab, _KEY_BLOCK)
    keys = torch.empty((count, vocab), dtype=torch.int64, device=logits.device)
    bad = torch.empty((count, parts), dtype=torch.int32, device=logits.device)
    if count:
        kernels.key_kernel[(count, parts)](logits, keys, bad, VOCAB=vocab, PARTS=parts, BLOCK=_KEY_BLOCK, num_warps=8)
    return keys, bad


def numbers(ordered: Tensor) -> Tensor:
    """The float32 numbers of the upper words of keys."""
    bits = ordered.int()
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).view(torch.float32)


def log_sums(logits: Tensor, largest: Tensor) -> Tensor:
    """(W,) float32: log of the sum of exp(logit - largest) over each row of (W, V)."""
    count, vocab = logits.shape
    chunks = triton.cdiv(vocab, _CHUNK)
    sums = torch.empty((count, chunks), dtype=torch.float32, device=logits.device)
    out = torch.empty(count, dtype=torch.float32, device=logits.device)
    if count:
        kernels.chunk_sum_kernel[(count, triton.cdiv(chunks, _HELD))](
            logits, largest, sums, VOCAB=vocab, CHUNKS=chunks, HELD=_HELD, num_warps=4, enable_fp_fusion=False
        )
        kernels.log_sum_kernel[(count,)](
            sums, out, CHUNKS=chunks, LEVELS=(chunks - 1).bit_length(), num_warps=4, enable_fp_fusion=False
        )
    return out
