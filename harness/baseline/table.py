"""An accepted capture as one Parquet table, a row per judged request, and back.

It does not know cells, verdicts or where tables are kept. Rules: token ids, finish reasons and prefix chains are always
there; logprobs and top-k by choice, as bit patterns; equal captures make equal bytes, so that they are stored once.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np

from harness.baseline.prefix import CHAINED, Chain, Chains, available_rules, chains
from harness.engine import Rule
from harness.errors import StoreError
from harness.judged import RequestKey, find_judged
from harness.traces import NO_TOKEN, PositionTable, RequestTable, Traces

if TYPE_CHECKING:
    import pyarrow as pa

Kept = Literal["logprobs", "topk"]
KEPT: tuple[Kept, ...] = ("logprobs", "topk")
SUFFIX = ".parquet"


def write_table(traces: Traces, keep: Sequence[Kept]) -> bytes:
    """The bytes of a capture's table. Raises ComparisonError for malformed tables."""
    import pyarrow.parquet as pq

    buffer = io.BytesIO()
    pq.write_table(_table(traces, keep), buffer, compression="zstd", write_statistics=False, store_schema=True)
    return buffer.getvalue()


def read_table(content: bytes) -> pa.Table:
    """The table of some bytes. Raises StoreError when they are no Parquet."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return pq.ParquetFile(pa.BufferReader(content), pre_buffer=False).read(use_threads=False)
    except (pa.ArrowInvalid, OSError) as error:
        raise StoreError(f"an accepted capture is no Parquet table: {error}") from error


def ends(table: pa.Table, rule: Rule) -> dict[RequestKey, str]:
    """The 32-byte digest of each request under a rule, in hexadecimal. Raises StoreError when it was not kept."""
    return dict(zip(_keys(table), _column(table, f"end_{rule}", rule), strict=True))


def stored_chains(table: pa.Table, rule: Rule) -> Chains:
    """The chains of a rule. Raises StoreError when they were not kept."""
    prefixes = _column(table, f"prefix_{rule}", rule)
    return {
        key: Chain(end=end, prefix=np.array(prefix, dtype=np.uint64))
        for (key, end), prefix in zip(ends(table, rule).items(), prefixes, strict=True)
    }


def chained_rules(table: pa.Table) -> tuple[Rule, ...]:
    """The rules whose chains a table holds, weakest first."""
    return tuple(rule for rule in CHAINED if f"end_{rule}" in table.column_names)


def traces_of(table: pa.Table) -> Traces:
    """The capture as far as it was kept; columns that were not are None."""
    lengths = np.array([len(tokens) for tokens in table.column("token").to_pylist()], dtype=np.int64)
    rows, columns = len(lengths), set(table.column_names)
    zeros, blank = np.zeros(rows, dtype=np.int32), np.zeros(rows, dtype=np.float64)
    requests = RequestTable(
        id=tuple(table.column("id").to_pylist()), sample=_ints(table, "sample"),
        companion=np.zeros(rows, dtype=np.bool_), prompt_tokens=_ints(table, "prompt_tokens"), length=lengths,
        finish_reason=tuple(table.column("finish_reason").to_pylist()), cached_tokens=zeros, preemptions=zeros,
        arrival_s=blank, first_token_s=blank, finish_s=blank,
    )  # fmt: skip
    ids = values = None
    if "topk_ids" in columns:
        ids, values = _candidates(table, lengths)
    positions = PositionTable(
        token=_flat(table, "token").astype(np.int32), pick=_flat(table, "pick").astype(np.int32),
        logprob=_flat(table, "logprob_bits").astype(np.uint32).view(np.float32) if "logprob_bits" in columns else None,
        topk_ids=ids, topk_logprobs=values, logits_digest=None,
    )  # fmt: skip
    return Traces(requests=requests, positions=positions, steps=None, counters=())


def _table(traces: Traces, keep: Sequence[Kept]) -> pa.Table:
    import pyarrow as pa

    judged = find_judged(traces)
    order = sorted(range(len(judged.keys)), key=lambda j: (judged.keys[j].id.encode(), judged.keys[j].sample))
    parts = [slice(int(judged.starts[j]), int(judged.starts[j] + judged.lengths[j])) for j in order]
    table, positions = traces.requests, traces.positions
    rows = [int(judged.rows[j]) for j in order]
    columns: dict[str, Any] = {
        "id": pa.array([judged.keys[j].id for j in order]),
        "sample": pa.array([judged.keys[j].sample for j in order], pa.int32()),
        "prompt_tokens": pa.array([int(table.prompt_tokens[row]) for row in rows], pa.int32()),
        "finish_reason": pa.array([table.finish_reason[row] for row in rows]),
        "token": pa.array([positions.token[part] for part in parts], pa.list_(pa.int32())),
        "pick": pa.array([positions.pick[part] for part in parts], pa.list_(pa.int32())),
    }
    for rule in available_rules(positions):
        found = chains(traces, rule)
        columns[f"end_{rule}"] = pa.array([found[judged.keys[j]].end for j in order])
        columns[f"prefix_{rule}"] = pa.array([found[judged.keys[j]].prefix for j in order], pa.list_(pa.uint64()))
    return pa.table(columns | _chosen(positions, parts, keep))


def _chosen(positions: PositionTable, parts: Sequence[slice], keep: Sequence[Kept]) -> dict[str, Any]:
    """The columns that are kept by choice, as bit patterns."""
    import pyarrow as pa

    columns: dict[str, Any] = {}
    if keep and positions.logprob is not None:
        bits = positions.logprob.view(np.uint32)
        columns["logprob_bits"] = pa.array([bits[part] for part in parts], pa.list_(pa.uint32()))
    if "topk" in keep and positions.topk_ids is not None and positions.topk_logprobs is not None:
        values = np.ascontiguousarray(positions.topk_logprobs).view(np.uint32)
        columns["topk_ids"] = pa.array([positions.topk_ids[part].reshape(-1) for part in parts], pa.list_(pa.int32()))
        columns["topk_bits"] = pa.array([values[part].reshape(-1) for part in parts], pa.list_(pa.uint32()))
    return columns


def _keys(table: pa.Table) -> list[RequestKey]:
    pairs = zip(table.column("id").to_pylist(), table.column("sample").to_pylist(), strict=True)
    return [RequestKey(name, sample) for name, sample in pairs]


def _column(table: pa.Table, name: str, rule: Rule) -> list[Any]:
    if name not in table.column_names:
        raise StoreError(
            f"the baseline was accepted without evidence for rule {rule!r}; accept one from a run that has it"
        )
    return cast("list[Any]", table.column(name).to_pylist())


def _ints(table: pa.Table, name: str) -> np.ndarray[Any, np.dtype[np.int32]]:
    return np.array(table.column(name).to_pylist(), dtype=np.int32)


def _flat(table: pa.Table, name: str) -> np.ndarray[Any, np.dtype[Any]]:
    return np.asarray(table.column(name).combine_chunks().flatten().to_numpy(zero_copy_only=False))


def _candidates(table: pa.Table, lengths: np.ndarray[Any, np.dtype[np.int64]]) -> tuple[Any, Any]:
    """Top-k ids and values, (N, K) each."""
    ids = _flat(table, "topk_ids").astype(np.int32)
    width = len(ids) // int(lengths.sum()) if len(ids) else 0
    values = _flat(table, "topk_bits").astype(np.uint32).view(np.float32)
    shape = (int(lengths.sum()), width)
    return (
        (ids.reshape(shape), values.reshape(shape)) if width else (np.full((shape[0], 0), NO_TOKEN, np.int32), values)
    )
