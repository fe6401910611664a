"""Checks what an engine says of itself against what it shows: counters, step table, lengths and values.

It does not know cells or verdicts. Rules: every contradiction is a sentence that names the request or the counter; an
unknown counter is not judged; an engine that shows no steps cannot be contradicted by them; an empty result means that
nothing contradicts, not that everything was true.

What must hold: a request's rows begin where its cached prefix ends, leave no gap, and reach its last reported output;
a token is computed twice only after a preemption or after
a step that threw proposed tokens away; only rejected proposals may lie beyond the last output; outputs are one per row
plus the accepted proposals; a request has one row per step; counters equal what the table
counts; reported logprobs are finite (a NaN or an infinity means that the logits were none).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from harness.judged import ComparisonError, check_tables
from harness.traces import NO_TOKEN, Bool, Float32, Int32, Int64, RequestTable, StepTable, Traces

MOST_TOLD = 5  # contradictions spelled out per kind


def check_claims(traces: Traces) -> tuple[str, ...]:
    """Contradictions in a capture, companions included; tables that are malformed count as the only one."""
    try:
        check_tables(traces, "tables")
    except ComparisonError as error:
        return (str(error),)
    found = [*_unfinished(traces.requests), *_not_finite(traces), *_disordered(traces), *_overmasked(traces.requests)]
    if traces.steps is None:
        return tuple(found)
    malformed = find_malformed(traces.steps, len(traces.requests.id))
    if malformed:
        return (*found, *malformed)
    coverage = _coverage(traces.requests, traces.steps, restored=_restored(traces))
    return (*found, *coverage, *_counted(traces, traces.steps))


def _unfinished(table: RequestTable) -> list[str]:
    """Companions may be cancelled; whether they were to be, `harness.expected` knows."""
    rows = zip(table.id, table.finish_reason, table.companion, strict=True)
    named = [name for name, reason, companion in rows if reason == "abort" and not companion]
    return _tell(named, "was aborted, so what it reports is not its result")


def _not_finite(traces: Traces) -> list[str]:
    positions = traces.positions
    bad: Bool = np.zeros(len(positions.token), dtype=np.bool_)
    if positions.logprob is not None:
        np.logical_or(bad, ~_finite(positions.logprob), out=bad)
    if positions.topk_ids is not None and positions.topk_logprobs is not None:
        listed = positions.topk_ids != NO_TOKEN
        np.logical_or(bad, _bad_candidates(listed, positions.topk_logprobs), out=bad)
    return _at(traces, bad, "a reported logprob is not a finite number")


def _disordered(traces: Traces) -> list[str]:
    """Top-k lists must descend; equal values are in the order of ids unless the logits behind them differ."""
    ids, values = traces.positions.topk_ids, traces.positions.topk_logprobs
    if ids is None or values is None or values.shape[1] < 2:
        return []
    rising = (values[:, 1:] > values[:, :-1]) & (ids[:, 1:] != NO_TOKEN)
    return _at(traces, rising.any(axis=1), "the top candidates are not in descending order")


def _at(traces: Traces, bad: Bool, what: str) -> list[str]:
    """Sentences for the first marked positions."""
    rows = np.flatnonzero(bad)[:MOST_TOLD]
    ends = np.cumsum(traces.requests.length)
    requests = np.searchsorted(ends, rows, side="right")
    places = rows - (ends - traces.requests.length)[requests]
    return [f"request {traces.requests.id[j]!r} position {p}: {what}" for j, p in zip(requests, places, strict=True)]


def _bad_candidates(listed: Bool, values: Float32) -> Bool:
    bad: Bool = np.logical_or.reduce(listed & ~_finite(values), axis=1)
    return bad


def _finite(values: Float32) -> Bool:
    finite: Bool = np.isfinite(values)
    return finite


def find_malformed(steps: StepTable, requests: int) -> list[str]:
    """Why a step table cannot be read at all; `requests` is the length of the request table."""
    sizes = {len(steps.step), len(steps.request), len(steps.start), len(steps.count)}
    if len(sizes) != 1:
        return [f"the step table's columns have different lengths: {sorted(sizes)}"]
    if not len(steps.step):
        return ["the step table is empty, but outputs are reported"] if requests else []
    found = []
    if bool((np.diff(steps.step) < 0).any()):
        found.append("the step table's steps go back in time")
    if int(steps.request.min()) < 0 or int(steps.request.max()) >= requests:
        found.append(f"the step table names requests outside the {requests} of the request table")
    if int(steps.start.min()) < 0 or int(steps.count.min()) < 1:
        found.append("the step table has rows that compute no token, or begin before the first")
    pairs = steps.step.astype(np.int64) * max(1, requests) + steps.request
    if len(np.unique(pairs)) != len(pairs):
        found.append("the step table runs a request twice in one step")
    return found


def _coverage(table: RequestTable, steps: StepTable, *, restored: bool) -> list[str]:
    order = np.argsort(steps.request, kind="stable")
    request, start = steps.request[order].astype(np.int64), steps.start[order].astype(np.int64)
    end = start + steps.count[order]
    first = np.concatenate(([True], request[1:] != request[:-1]))
    before = np.where(first, table.cached_tokens[request], np.concatenate(([0], end[:-1])))
    rewinds = _per_request(~first & (start < before), request, len(table.id))
    most = np.zeros(len(table.id), dtype=np.int64)
    np.maximum.at(most, request, end)
    last = table.prompt_tokens + table.length  # tokens of prompt and output together
    drafted, accepted, rollbacks = _proposals(table)
    rejected, allowed = drafted - accepted, table.preemptions + rollbacks
    yielding = _per_request(end >= table.prompt_tokens[request], request, len(table.id))
    claimed = (table.drafted is not None) & (table.preemptions == 0)
    miscounted = claimed & ((yielding + accepted != table.length) | (rejected < 0))
    seen = np.isin(np.arange(len(table.id)), request)
    wrong_start = _per_request(first & (start != before), request, len(table.id)) > 0
    gaps = _per_request(~first & (start > before), request, len(table.id)) > 0
    return [
        *_tell(_names(table, ~seen), "reports an output, but the step table never ran it"),
        *_tell(_names(table, wrong_start), "does not begin where its cached prefix ends"),
        *_tell(_names(table, gaps), "has tokens that no step computed"),
        *_tell(_names(table, seen & (most < last - 1)), "reports outputs that no step computed"),
        *_tell(_names(table, most > last + rejected), "has more tokens computed than prompt and output hold"),
        *_tell(_names(table, rewinds > allowed), "was computed again more often than preempted"),
        *_tell(_names(table, miscounted), "claims accepted proposals that its rows do not show"),
        *_tell(_names(table, _silent(table, rewinds, restored)), "claims a preemption, but nothing was computed again"),
    ]


def _proposals(table: RequestTable) -> tuple[Int64, Int64, Int64]:
    """Proposed, accepted and thrown-away counts (R,); zeros where the engine does not say."""
    columns = (table.drafted, table.accepted, table.rollbacks)
    none = np.zeros(len(table.id), dtype=np.int64)
    return tuple(none if column is None else column.astype(np.int64) for column in columns)  # type: ignore[return-value]


def _restored(traces: Traces) -> bool:
    """Whether a prefix cache was in play, by what requests found in it at first or after a preemption."""
    after = dict(traces.counters).get("restored_tokens", 0)
    return after > 0 or bool((traces.requests.cached_tokens > 0).any())


def _silent(table: RequestTable, rewinds: Int64, restored: bool) -> Bool:
    """Preemptions without a trace; with a prefix cache in play the recomputation may have been served from it."""
    if restored:
        return np.zeros(len(table.id), dtype=np.bool_)
    silent: Bool = (table.preemptions > 0) & (rewinds == 0)
    return silent


def _grammar_columns(table: RequestTable) -> list[tuple[str, Int32]]:
    columns = (("masked", table.masked), ("steered", table.steered))
    return [(name, column) for name, column in columns if column is not None]


def _overmasked(table: RequestTable) -> list[str]:
    """A mask works at generated positions, and can change no more picks than it was at work at."""
    if table.masked is None or table.steered is None:
        return []
    wrong = (table.masked < 0) | (table.masked > table.length) | (table.steered < 0) | (table.steered > table.masked)
    return _tell(_names(table, wrong), "claims more positions under a grammar than it has")


def _counted(traces: Traces, steps: StepTable) -> list[str]:
    _, sizes = np.unique(steps.step, return_counts=True)
    shown = {
        "max_running": int(sizes.max()),
        "preemptions": int(traces.requests.preemptions.sum()),
        "steps": len(sizes),
        "tokens_computed": int(steps.count.sum()),
        "cached_tokens": int(traces.requests.cached_tokens.sum()),
        **{name: int(column.sum()) for name, column in _grammar_columns(traces.requests)},
    }
    return [
        f"counter {name} claims {claimed}, the tables show {shown[name]}"
        for name, claimed in traces.counters
        if name in shown and shown[name] != claimed
    ]


def _per_request(rows: Bool, request: Int64, requests: int) -> Int64:
    """How many of the marked rows each request has."""
    return np.bincount(request[rows], minlength=requests).astype(np.int64)


def _names(table: RequestTable, which: Bool) -> list[str]:
    return [table.id[j] for j in np.flatnonzero(which)]


def _tell(names: Sequence[str], what: str) -> list[str]:
    return [f"request {name!r} {what}" for name in names[:MOST_TOLD]]
