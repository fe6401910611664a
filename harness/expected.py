"""What a capture must hold at least, by the plan: every request, its prompt, its length and its candidates.

It does not know verdicts. Rules: an answer that both arms lack is as wrong as one that a single arm lacks; what is
missing is named.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from harness.request import Request
from harness.schedule import Schedule

if TYPE_CHECKING:
    from harness.traces import Traces

MOST_TOLD = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """One request of a case, as far as its answer is determined by the request itself."""

    id: str
    companion: bool
    samples: int
    prompt_tokens: int
    max_tokens: int
    must_fill: bool  # nothing but max_tokens can end it
    candidates: int  # top-k asked for
    grammar: bool = False  # the output must follow one
    cancelled_after: int | None = None  # tokens after which a companion is taken out


def expected_of(
    requests: Sequence[Request], judged: Sequence[str], schedule: Schedule | None = None
) -> tuple[Expected, ...]:
    """What a case's requests demand of its capture; those not in `judged` are companions, some of them cancelled."""
    arrivals = schedule.arrivals if schedule is not None else ()
    cancelled = {arrival.request: arrival.cancel_after_tokens for arrival in arrivals}
    return tuple(
        Expected(
            id=request.id,
            companion=request.id not in judged,
            samples=request.sampling.n,
            prompt_tokens=len(request.prompt_token_ids),
            max_tokens=request.sampling.max_tokens,
            must_fill=request.sampling.ignore_eos
            and not request.sampling.stop
            and not request.sampling.stop_token_ids
            and request.grammar is None,
            candidates=request.sampling.logprobs,
            grammar=request.grammar is not None,
            cancelled_after=cancelled.get(request.id),
        )
        for request in requests
    )


def missing_from(traces: Traces, expected: Sequence[Expected]) -> tuple[str, ...]:
    """What the capture lacks or has beyond the plan, in sentences; empty when it is whole."""
    table = traces.requests
    rows = {(name, int(sample)): row for row, (name, sample) in enumerate(zip(table.id, table.sample, strict=True))}
    wanted = {(entry.id, sample): entry for entry in expected for sample in range(entry.samples)}
    lost = [name for name, _ in wanted.keys() - rows.keys()]
    strange = [name for name, _ in rows.keys() - wanted.keys()]
    found = _named(lost, "was asked for and has no answer") + _named(strange, "was never asked for")
    found += [
        f"request {key[0]!r}: {sentence}"
        for key, entry in wanted.items()
        if key in rows
        for sentence in _row_mistakes(traces, rows[key], entry)
    ]
    return tuple(found[: 2 * MOST_TOLD])


def _row_mistakes(traces: Traces, row: int, entry: Expected) -> list[str]:
    table = traces.requests
    prompt, length, reason = int(table.prompt_tokens[row]), int(table.length[row]), table.finish_reason[row]
    found = []
    if bool(table.companion[row]) is not entry.companion:
        found.append("a companion is reported as judged, or the other way round")
    if prompt != entry.prompt_tokens:
        found.append(f"ran with {prompt} prompt tokens, {entry.prompt_tokens} were given")
    if entry.cancelled_after is not None or reason == "abort":
        return found + _cancellation_mistakes(length, reason, entry)
    if length > entry.max_tokens or (reason == "length" and length != entry.max_tokens):
        found.append(f"has {length} output tokens and finish reason {reason!r}, max_tokens is {entry.max_tokens}")
    elif entry.must_fill and reason != "length":
        found.append(f"ended with {reason!r} after {length} tokens, though only max_tokens could end it")
    found += _mask_mistakes(traces, row, entry)
    if not entry.companion:
        found += _candidate_mistakes(traces, row, entry)
    return found


def _cancellation_mistakes(length: int, reason: str, entry: Expected) -> list[str]:
    """Only a companion that was to be cancelled may be cut off, and then where it was to be; it may end before."""
    if entry.cancelled_after is None:
        return ["was aborted, so what it reports is not its result"]
    if reason == "abort" and length != entry.cancelled_after:
        return [f"was cut off after {length} tokens, it was to be cancelled after {entry.cancelled_after}"]
    if reason != "abort" and length > entry.cancelled_after:
        return [f"ran on for {length} tokens, it was to be cancelled after {entry.cancelled_after}"]
    return []


def _candidate_mistakes(traces: Traces, row: int, entry: Expected) -> list[str]:
    """Fewer candidates than asked for; an engine without any top-k is left to the rule."""
    ids = traces.positions.topk_ids
    if ids is None or not entry.candidates:
        return []
    end = int(traces.requests.length[: row + 1].sum())
    part = ids[end - int(traces.requests.length[row]) : end]
    counts = (part >= 0).sum(axis=1)
    if len(counts) and int(counts.min()) < entry.candidates:
        return [f"reports {int(counts.min())} top candidates at some position, {entry.candidates} were asked for"]
    return []


def _mask_mistakes(traces: Traces, row: int, entry: Expected) -> list[str]:
    """Every position under a grammar's mask, and none without one; an engine that says nothing is left to the rule."""
    masked = traces.requests.masked
    wanted = int(traces.requests.length[row]) if entry.grammar else 0
    if masked is None or int(masked[row]) == wanted:
        return []
    return [f"was sampled under a grammar at {int(masked[row])} positions, expected {wanted}"]


def _named(names: Sequence[str], what: str) -> list[str]:
    told = sorted(set(names))
    if not told:
        return []
    more = f" and {len(told) - MOST_TOLD} more" if len(told) > MOST_TOLD else ""
    return [f"{len(told)} request(s) of which each {what}: {', '.join(map(repr, told[:MOST_TOLD]))}{more}"]
