"""The fields of a comparison: which rule compares which, and the columns they live in.

It does not know requests' contents or verdicts. Rules: a rule compares everything weaker rules compare; a column a
rule needs and a capture lacks is an error, never a skip, and so is a position without candidates or without a pick;
top-k lists of different width are padded, so that a longer list in one capture is a difference.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np

from harness.compare.columns import BLOCK_CELLS, Bits, Run, bits
from harness.digest import PADDING_BITS
from harness.engine import RULES, Rule
from harness.judged import ComparisonError
from harness.traces import NO_TOKEN, Float32, Int32, Int64, PositionTable, UInt64

FieldName = Literal["token", "pick", "logprob", "topk_ids", "topk_logprobs", "tensors", "finish_reason", "length"]

_ADDED_BY: dict[Rule, tuple[FieldName, ...]] = {
    "text": ("token", "pick"),
    "tokens": (),
    "logprobs": ("logprob",),
    "topk": ("topk_ids", "topk_logprobs"),
    "tensors": ("tensors",),
}


def position_fields(rule: Rule) -> tuple[FieldName, ...]:
    """The fields compared at each position under a rule, weaker rules' first."""
    levels = RULES[: RULES.index(rule) + 1]
    return tuple(field for level in levels for field in _ADDED_BY[level])


def operands(field: FieldName, reference: PositionTable, variant: PositionTable, rule: Rule) -> tuple[Bits, Bits]:
    """Both sides of a field as integers of its bits, (N, W) and (N', W). Raises ComparisonError if one is missing."""
    a, b = _column(field, reference), _column(field, variant)
    if a is None or b is None:
        sides = " and ".join(name for name, side in (("reference", a), ("variant", b)) if side is None)
        raise ComparisonError(
            f"rule {rule!r} compares {field}, which the {sides} does not carry; judge under a weaker rule"
        )
    if a.ndim == 2 and b.ndim == 2:
        width = max(a.shape[1], b.shape[1])
        return bits(_widen(a, width)), bits(_widen(b, width))
    return bits(a), bits(b)


def _column(field: FieldName, table: PositionTable) -> Int32 | Float32 | UInt64 | None:
    columns = {
        "token": table.token,
        "pick": table.pick,
        "logprob": table.logprob,
        "topk_ids": table.topk_ids,
        "topk_logprobs": table.topk_logprobs,
        "tensors": table.logits_digest,
    }
    return columns[field]


def _widen(column: Int32 | Float32 | UInt64, width: int) -> Int32 | Float32 | UInt64:
    """A top-k column with padding columns added on the right; the same object if it is wide enough."""
    missing = width - column.shape[1]
    if not missing:
        return column
    if column.dtype == np.float32:
        padding = np.full((len(column), missing), PADDING_BITS, dtype=np.uint32).view(np.float32)
        return np.concatenate([column, padding], axis=1)
    return np.concatenate([column, np.full((len(column), missing), NO_TOKEN, dtype=np.int32)], axis=1)


class Listed(NamedTuple):
    """What the reference lists in a column of ids."""

    ids: int  # real ids, padding left out
    missing: Int64  # numbers (the runs' `out`) of rows without a first id


def find_listed(ids: Bits, runs: Sequence[Run]) -> Listed:
    """Counts the real ids of the reference's rows in the runs and finds the rows without any, in one pass."""
    total, missing = 0, [np.empty(0, dtype=np.int64)]
    if not ids.shape[1]:
        return Listed(0, np.concatenate([np.arange(run.out, run.out + run.rows) for run in runs]))
    rows = max(1, BLOCK_CELLS // ids.shape[1])
    for run in runs:
        for start in range(0, run.rows, rows):
            first = run.reference + start
            block = ids[first : first + min(rows, run.rows - start)]
            padded = int(block.min()) < 0
            total += int((block != NO_TOKEN).sum()) if padded else block.size
            if padded:
                missing.append(np.flatnonzero(block[:, 0] == NO_TOKEN) + (run.out + start))
    return Listed(total, np.concatenate(missing))
