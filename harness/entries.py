"""A step table spread out: one entry per token computed, for the judged requests, in order of time.

It does not know axes. Rules: an entry says which token of which request ran in which row of the table; a row that
begins before the previous one of its request ended starts a new epoch (the engine threw keys and values away and
computes them anew); the first computation of a token is the one that led to the reported output.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from harness.judged import Judged
from harness.traces import Bool, Int32, Int64, StepTable, Traces, UInt64


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rows:
    """Rows of a step table that belong to judged requests, grouped by request, each group in order of time; Q rows."""

    request: Int64  # (Q,) place in the alignment
    start: Int64  # (Q,) first token of the sequence
    count: Int64  # (Q,)
    others: UInt64  # (Q,) hash of the multiset of the step's other rows; 0 for none
    company: Int64  # (Q,) how many other rows the step ran
    rewound: Bool  # (Q,) begins before the request's previous row ended


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Entries:
    """One entry per computed token; E entries, grouped by request, in order of time."""

    rows: Rows
    row: Int64  # (E,) index into `rows`
    request: Int64  # (E,)
    token: Int64  # (E,) index in prompt + output
    epoch: Int64  # (E,) counts requests and rewinds: a new epoch begins with each
    fresh: Bool  # (E,) the first computation of this token


def find_rows(steps: StepTable, judged: Judged, requests: int) -> Rows:
    """The judged requests' rows. `requests` is the number of rows of the request table."""
    others, company = _others(steps)
    place = np.full(requests, -1, dtype=np.int64)
    place[judged.rows] = np.arange(len(judged.rows))
    request = place[steps.request]
    order = np.argsort(np.where(request < 0, len(judged.rows), request), kind="stable")
    order = order[request[order] >= 0]
    request, start = request[order], steps.start[order].astype(np.int64)
    count = steps.count[order].astype(np.int64)
    same = np.concatenate(([False], request[1:] == request[:-1]))
    rewound = same & (start < np.concatenate(([0], (start + count)[:-1])))
    return Rows(
        request=request,
        start=start,
        count=count,
        others=others[order],
        company=company[order],
        rewound=rewound,
    )


def expand(traces: Traces, judged: Judged) -> Entries:
    """Entries of a capture that shows its steps; row numbers of `judged` refer to its request table."""
    if traces.steps is None:
        raise ValueError("the capture shows no step table")
    rows = find_rows(traces.steps, judged, len(traces.requests.id))
    row = np.repeat(np.arange(len(rows.count)), rows.count)
    begins = np.cumsum(rows.count) - rows.count
    token = rows.start[row] + np.arange(len(row)) - begins[row]
    request = rows.request[row]
    newly = np.concatenate(([True], rows.request[1:] != rows.request[:-1])) if len(rows.count) else rows.rewound
    epoch = (np.cumsum(newly | rows.rewound) - 1)[row]
    return Entries(rows=rows, row=row, request=request, token=token, epoch=epoch, fresh=_fresh(request, token))


def match(entries: Entries, other: Entries) -> Int64:
    """For each of `entries` the row of `other` that computed the same token, or -1.

    The n-th computation of a token is matched with its n-th in `other`, or with the last where there are fewer.
    """
    span = 1 + max((int(side.token.max()) for side in (entries, other) if len(side.token)), default=0)
    known = other.request * span + other.token
    order = np.argsort(known, kind="stable")
    wanted = entries.request * span + entries.token
    first = np.searchsorted(known[order], wanted, side="left")
    computed = np.searchsorted(known[order], wanted, side="right") - first
    found = np.full(len(wanted), -1, dtype=np.int64)
    hit = computed > 0
    found[hit] = other.row[order[(first + np.minimum(_repetition(wanted), computed - 1))[hit]]]
    return found


def _repetition(keys: Int64) -> Int64:
    """How often each key occurred before, in order: 0 for the first time."""
    order = np.argsort(keys, kind="stable")
    ranked = keys[order]
    before = np.empty(len(keys), dtype=np.int64)
    before[order] = np.arange(len(keys)) - np.searchsorted(ranked, ranked, side="left")
    return before


def _fresh(request: Int64, token: Int64) -> Bool:
    """Entries that go beyond everything their request computed before them."""
    if not len(token):
        return np.empty(0, dtype=np.bool_)
    key = request * (int(token.max()) + 2) + token + 1
    before = np.concatenate(([0], np.maximum.accumulate(key)[:-1]))
    return key > before


def _others(steps: StepTable) -> tuple[UInt64, Int64]:
    """Per row of the table: a hash over the step's other rows, and their number."""
    if not len(steps.step):
        return np.empty(0, dtype=np.uint64), np.empty(0, dtype=np.int64)
    own = _mix(steps.start + steps.count, steps.count)
    _, step = np.unique(steps.step, return_inverse=True)
    total = np.zeros(int(step.max()) + 1, dtype=np.uint64)
    np.add.at(total, step, own)
    size = np.bincount(step)
    return total[step] - own, (size[step] - 1).astype(np.int64)


def _mix(context: Int32, count: Int32) -> UInt64:
    """A 64-bit hash of (context length, token count); sums of it stand for multisets (SplitMix64's finaliser)."""
    x = (context.astype(np.uint64) << np.uint64(32)) | count.astype(np.uint64)
    x += np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
