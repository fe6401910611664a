"""The judged part of a capture: its requests without companions, keyed by (id, sample), and where their rows lie.

It does not know rules, verdicts or engines. Rules: tables that contradict themselves, duplicate keys and empty
requests are errors; two captures are aligned by key alone, never by order; nothing is dropped to make them fit.

The *judged layout* numbers the generated positions of the judged requests, companions left out, in the capture's own
order of requests. Masks of comparisons and witnesses are arrays over the reference's judged layout.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from harness.errors import EngineError
from harness.traces import Int64, PositionTable, RequestTable, Traces

MOST_NAMED = 5  # ids spelled out in one message


class ComparisonError(EngineError):
    """Two captures that cannot be compared: requests or evidence missing, duplicated or malformed."""


class RequestKey(NamedTuple):
    """What a trace is keyed by."""

    id: str
    sample: int

    def __str__(self) -> str:
        return f"{self.id!r}" if self.sample == 0 else f"{self.id!r} sample {self.sample}"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Judged:
    """Judged requests in the capture's order; J of them, N positions in all."""

    keys: tuple[RequestKey, ...]
    rows: Int64  # (J,) rows of the request table
    starts: Int64  # (J,) first row in the position table
    lengths: Int64  # (J,) generated positions, at least 1

    @property
    def offsets(self) -> Int64:
        """Where each request begins in the judged layout, and the end: (J + 1,)."""
        return np.concatenate(([0], np.cumsum(self.lengths))).astype(np.int64)

    @property
    def positions(self) -> int:
        """Positions in the judged layout."""
        return int(self.lengths.sum())

    def locate(self, index: int) -> tuple[int, int]:
        """(request, position in it) of an index of the judged layout."""
        request = int(np.searchsorted(self.offsets, index, side="right")) - 1
        return request, index - int(self.offsets[request])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Alignment:
    """The same judged requests in two captures: entry j of both sides has the same key, in the reference's order."""

    reference: Judged
    variant: Judged

    @property
    def keys(self) -> tuple[RequestKey, ...]:
        """The common keys, in the reference's order."""
        return self.reference.keys


def find_judged(traces: Traces, side: str = "capture") -> Judged:
    """Locates the judged requests. `side` names the capture in messages.

    Raises:
        ComparisonError: malformed tables, a key twice, a judged request without positions, or no judged request.
    """
    check_tables(traces, side)
    table = traces.requests
    ends = np.cumsum(table.length)
    rows = np.flatnonzero(~table.companion).astype(np.int64)
    keys = tuple(RequestKey(table.id[row], int(table.sample[row])) for row in rows)
    if not keys:
        raise ComparisonError(f"{side}: no judged request, so there is nothing to compare")
    _refuse("appears more than once", [key for key, n in Counter(keys).items() if n > 1], side)
    lengths = table.length[rows].astype(np.int64)
    _refuse("has no generated position", [keys[j] for j in np.flatnonzero(lengths < 1)], side)
    return Judged(keys=keys, rows=rows, starts=(ends[rows] - lengths).astype(np.int64), lengths=lengths)


def align(reference: Traces, variant: Traces) -> Alignment:
    """Pairs the judged requests of two captures by (id, sample).

    Raises:
        ComparisonError: a request missing from the variant, one too many, or another number of prompt tokens.
    """
    ref, var = find_judged(reference, "reference"), find_judged(variant, "variant")
    place = {key: j for j, key in enumerate(var.keys)}
    _refuse("is missing", [key for key in ref.keys if key not in place], "variant")
    known = set(ref.keys)
    _refuse("is not in the reference", [key for key in var.keys if key not in known], "variant")
    order = np.array([place[key] for key in ref.keys], dtype=np.int64)
    var = Judged(keys=ref.keys, rows=var.rows[order], starts=var.starts[order], lengths=var.lengths[order])
    prompts = reference.requests.prompt_tokens[ref.rows] != variant.requests.prompt_tokens[var.rows]
    _refuse("has another number of prompt tokens", [ref.keys[j] for j in np.flatnonzero(prompts)], "variant")
    return Alignment(reference=ref, variant=var)


def check_tables(traces: Traces, side: str) -> None:
    """Shapes and types of the request and position tables. Raises ComparisonError on the first mistake."""
    requests, positions = traces.requests, traces.positions
    _check_requests(requests, side)
    n = int(requests.length.sum())
    _check_column(positions.token, "token", np.int32, (n,), side)
    _check_column(positions.pick, "pick", np.int32, (n,), side)
    if positions.logprob is not None:
        _check_column(positions.logprob, "logprob", np.float32, (n,), side)
    _check_topk(positions, n, side)
    if positions.logits_digest is not None:
        _check_column(positions.logits_digest, "logits_digest", np.uint64, (n, 2), side)


def _check_requests(table: RequestTable, side: str) -> None:
    rows = (len(table.id),)
    _check_column(table.sample, "sample", np.int32, rows, side)
    _check_column(table.companion, "companion", np.bool_, rows, side)
    _check_column(table.prompt_tokens, "prompt_tokens", np.int32, rows, side)
    _check_column(table.length, "length", np.int64, rows, side)
    if len(table.finish_reason) != rows[0]:
        raise ComparisonError(f"{side}: {rows[0]} requests but {len(table.finish_reason)} finish reasons")
    if rows[0] and int(table.length.min()) < 0:
        raise ComparisonError(f"{side}: request {table.id[int(table.length.argmin())]!r} has a negative length")


def _check_topk(positions: PositionTable, n: int, side: str) -> None:
    ids, values = positions.topk_ids, positions.topk_logprobs
    if (ids is None) != (values is None):
        raise ComparisonError(f"{side}: top-k ids and top-k logprobs must come together, one of them is missing")
    if ids is not None and values is not None:
        width = ids.shape[1] if ids.ndim == 2 else 0
        _check_column(ids, "topk_ids", np.int32, (n, width), side)
        _check_column(values, "topk_logprobs", np.float32, (n, width), side)


def _check_column(
    column: np.ndarray[tuple[int, ...], np.dtype[np.generic]],
    name: str,
    dtype: type[np.generic],
    shape: tuple[int, ...],
    side: str,
) -> None:
    if column.dtype != dtype or column.shape != shape:
        expected = f"{np.dtype(dtype).name} of shape {shape}"
        raise ComparisonError(f"{side}: column {name}: expected {expected}, found {column.dtype} of {column.shape}")


def _refuse(what: str, keys: Sequence[RequestKey], side: str) -> None:
    if not keys:
        return
    named = ", ".join(str(key) for key in sorted(keys)[:MOST_NAMED])
    more = f" and {len(keys) - MOST_NAMED} more" if len(keys) > MOST_NAMED else ""
    raise ComparisonError(f"{side}: {len(keys)} request(s) of which each {what}: {named}{more}")
