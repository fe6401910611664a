"""What mode `cpu-invariant` changes in a vLLM worker, function by function. Imports neither vLLM nor the harness.

Rules: each change wraps one function of vLLM and counts how often it acted; values that vLLM computes with two rows or
more are never touched; where a change does not act, vLLM's own result leaves as it came.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any


def padded(own: Callable[..., Any], count: list[int], *, x: int) -> Callable[..., Any]:
    """`own`, a matrix product, with the activations, argument number `x`, doubled where they are one row.

    oneDNN has a kernel of its own for one row, whose bits are not those of the others.
    """
    import torch

    def product(*arguments: Any) -> Any:  # noqa: ANN401 - vLLM's own signatures
        rows = arguments[x]
        if rows.dim() != 2 or rows.shape[0] != 1:
            return own(*arguments)
        count[0] += 1
        return own(*arguments[:x], torch.cat([rows, rows]), *arguments[x + 1 :])[:1]

    return product


def ordered(own: Callable[..., Any], count: list[int]) -> Callable[..., Any]:
    """`own`, the V1 sampler's `gather_logprobs`, with candidates by value descending, then id ascending.

    vLLM takes as many candidates for everybody as the request that wants most, by `torch.topk`; which of several equal
    values it keeps, and in which order, follows that number. Logits in bfloat16 are often equal.
    """

    def gather(logprobs: Any, num_logprobs: int, token_ids: Any) -> Any:  # noqa: ANN401 - tensors (rows, vocabulary)
        found = own(logprobs, num_logprobs, token_ids=token_ids)
        if num_logprobs < 1:
            return found
        ids, values = found.logprob_token_ids, found.logprobs  # (rows, 1 + K), the sampled token first
        top = _lowest_ids(logprobs, ids[:, 1:].long(), values[:, 1:])
        order = top.argsort(dim=1)
        order = order.gather(1, values[:, 1:].gather(1, order).argsort(dim=1, descending=True, stable=True))
        top = top.gather(1, order).to(ids.dtype)
        count[0] += int((top != ids[:, 1:]).any(dim=1).sum())
        ids[:, 1:] = top
        return found

    return gather


def _lowest_ids(logprobs: Any, ids: Any, values: Any) -> Any:  # noqa: ANN401 - tensors (rows, vocabulary), (rows, K)
    """The ids with those of the smallest value replaced by the lowest ids that have it. `values` descend."""
    least = values[:, -1:]
    equal, kept = logprobs == least, values == least
    short = (equal.sum(dim=1) > kept.sum(dim=1)).nonzero().flatten().tolist()
    for row in short:
        ids[row, kept[row]] = equal[row].nonzero().flatten()[: int(kept[row].sum())]
    return ids


def tiled(own: Callable[..., Any], count: list[int]) -> Callable[..., Any]:
    """`own`, `CPUAttentionMetadataBuilder.build`, with each request's queries as several requests of few tokens.

    The kernel sizes its tiles of keys by the number of query tokens in a work item, and which tokens share one follows
    the batch and the threads; the softmax is rescaled at every tile's end. No more queries than one iteration of the
    kernel holds make the tile what it is for a single token. Raises NotImplementedError where it is not causal.
    """

    def build(self: Any, common_prefix_len: int, metadata: Any, fast_build: bool = False) -> Any:  # noqa: ANN401 - vLLM's signature
        if metadata.causal is not True:
            raise NotImplementedError("fixed_tiles: queries can be cut where attention is causal alone")
        tokens = query_tokens(self.isa, self.num_heads // self.num_kv_heads)
        if metadata.max_query_len <= tokens:
            return own(self, common_prefix_len, metadata, fast_build)
        count[0] += 1
        return own(self, common_prefix_len, _cut(metadata, tokens), fast_build)

    return build


def query_tokens(isa: str, heads_per_key: int) -> int:
    """Tokens whose query heads fit one iteration of vLLM's kernel for `isa`; a number that is safe for every one.

    A kernel holds at least 8 query heads; where the heads of one key head do not divide what it holds, it takes one
    head of 8 tokens instead, which is known of "vec" alone.
    """
    if isa == "vec" and 8 % heads_per_key:
        return 8
    return max(1, 8 // heads_per_key)


def _cut(metadata: Any, tokens: int) -> Any:  # noqa: ANN401 - CommonAttentionMetadata
    """The metadata with requests of at most `tokens` queries; keys and values of them all are in the cache already."""
    import torch

    requests = metadata.num_reqs
    starts = metadata.query_start_loc[: requests + 1].tolist()
    ends = metadata.seq_lens[:requests].tolist()
    rows, bounds, lengths = [], [starts[0]], []
    for row, (begin, stop, end) in enumerate(zip(starts[:-1], starts[1:], ends, strict=True)):
        for place in range(min(begin + tokens, stop), stop + tokens, tokens):
            last = min(place, stop)
            rows.append(row)
            bounds.append(last)
            lengths.append(end - (stop - last))
    loc = torch.tensor(bounds, dtype=metadata.query_start_loc.dtype)
    return dataclasses.replace(
        metadata, query_start_loc=loc, query_start_loc_cpu=loc, num_reqs=len(rows), max_query_len=tokens,
        seq_lens=torch.tensor(lengths, dtype=metadata.seq_lens.dtype),
        block_table_tensor=metadata.block_table_tensor[torch.tensor(rows)],
    )  # fmt: skip
