"""Sums of sub-trees between ranks that are processes of their own. It adds nothing.

Rules: every rank gives as many sums as the one that has most, so that all give the same shape; what fills up is read by
nobody; from card to card where the group spans cards, else through host memory.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engines.bundled.gpu.tensorcore.parallel import Sums, clip
from engines.bundled.parallel.group import Group
from engines.bundled.parallel.layout import Span, subtrees

Tensor = torch.Tensor


class RankExchange:
    """An `Exchange` of the one rank of this process with the others of its group."""

    def __init__(self, group: Group, chunks: Sequence[Span]) -> None:
        """`chunks` are those of every rank, in order."""
        self._group, self._chunks = group, chunks
        self.bytes = 0  # that this rank gave so far

    def __call__(self, sums: Sequence[Sums], count: int, like: Tensor) -> Sums:
        """The sums of all ranks, each (T, hidden) float32. Raises CollectiveError when a rank is gone or silent."""
        (mine,) = sums
        nodes = [subtrees(count, clip(span, count)) for span in self._chunks]
        own = torch.zeros((max(map(len, nodes)), *like.shape), dtype=torch.float32, device=like.device)
        for place, node in zip(own, nodes[self._group.rank], strict=False):
            place.copy_(mine[node])
        everyone = self._gather(own)
        self.bytes += own.numel() * own.element_size()
        return {node: part for held, parts in zip(nodes, everyone, strict=True) for node, part in zip(held, parts)}  # noqa: B905 - padding

    def _gather(self, own: Tensor) -> Tensor:
        if not self._group.spans_cards:
            return torch.from_numpy(self._group.gather(own.cpu().numpy())).to(own.device)
        everyone = own.new_empty((self._group.ranks, *own.shape))
        torch.cuda.current_stream(own.device).synchronize()
        self._group.gather_into(everyone.view(-1), own.view(-1))
        return everyone
