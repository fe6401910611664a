"""A verdict's parts in words: shared by every report, so that all of them say the same.

It does not know HTML, Markdown, XML or terminals. Rules: what was not recorded is said to be so and never
shown as 0; a sentence carries its units; one line is one line, whatever an engine put into it.
"""

from __future__ import annotations

from reports.record import Comparison, Control, Diagnosis, First, Floor, Verdict

_LINE = 300  # characters of a line of a five-line failure


def verdict_words(verdict: Verdict) -> str:
    """The verdict, and whether the cell expects it."""
    name = verdict.verdict or "no verdict"
    return f"{name} (expected)" if verdict.is_expected else name


def axis_words(verdict: Verdict, arrow: str = "->") -> str:
    """`max_num_seqs: 1 -> 8`."""
    axis = verdict.axis
    if not axis.reference and not axis.variant:
        return axis.name or "no axis"
    return f"{axis.name}: {axis.reference} {arrow} {axis.variant}"


def compared_words(comparison: Comparison | None) -> str:
    """How much was compared."""
    if comparison is None:
        return "nothing compared"
    amounts = (
        ("request", comparison.requests),
        ("position", comparison.positions),
        ("element", comparison.elements),
    )
    return ", ".join(count(amount, noun) for noun, amount in amounts)


def witnessed_words(comparison: Comparison | None) -> str:
    """At how many positions the axis really varied."""
    return "nothing witnessed" if comparison is None else f"{number(comparison.witnessed)} witnessed"


def floor_words(floor: Floor | None) -> str:
    """What the reference captured twice showed."""
    if floor is None:
        return "none"
    words = {"same": "same", "different": "DIFFERS", "error": "no result"}
    return words.get(floor.verdict, floor.verdict or "not recorded")


def control_words(control: Control | None) -> str:
    """Which control ran and whether it fired."""
    if control is None or control.kind in ("", "none"):
        return "none"
    if control.kind == "planted":
        return f"comparator only, fault {'found' if control.fired else 'NOT FOUND'}"
    fired = {True: "fired", False: "SILENT", None: "not recorded"}[control.fired]
    return f"{control.value or control.kind} {fired}"


def field_words(comparison: Comparison | None) -> str:
    """Which fields differ, at how many positions: `logprob 45, pick 3`."""
    if comparison is None or not comparison.differing:
        return ""
    return ", ".join(f"{name} {amount:,}" for name, amount in comparison.differing)


def spread_words(verdict: Verdict) -> str:
    """How many positions and requests differ; for a floor that differs, by the requests of its diagnosis."""
    comparison, diagnosis = verdict.comparison, verdict.diagnosis
    if comparison is not None:
        return (
            f"{number(comparison.differing_positions)} of {count(comparison.positions, 'position')} "
            f"in {number(comparison.differing_requests)} of {count(comparison.requests, 'request')}; "
            f"{number(comparison.witnessed)} positions witnessed"
        )
    if diagnosis is None or not diagnosis.per_request:
        return "nothing compared"
    rows = diagnosis.per_request
    positions, differing = sum(row.positions or 0 for row in rows), sum(row.differing or 0 for row in rows)
    requests = sum(row.first is not None for row in rows)
    return f"{differing:,} of {count(positions, 'position')} in {requests:,} of {count(len(rows), 'request')}"


def arms(verdict: Verdict) -> tuple[str, str]:
    """What the two sides of a difference are: reference and variant, or the reference captured twice."""
    if verdict.floor is not None and verdict.floor.verdict == "different":
        return "reference", "reference again"
    return f"reference ({verdict.axis.reference})", f"variant ({verdict.axis.variant})"


def first_words(first: First | None, arrow: str = "->") -> str:
    """Where two captures first differ, between which values, and how close a call it was."""
    if first is None:
        return "no position located"
    sample = f", sample {first.sample}" if first.sample else ""
    change = f"{first.field} {first.reference or 'nothing'} {arrow} {first.variant or 'nothing'}"
    beside = [f"{first.ulp:,} ulp"] if first.ulp is not None else []
    beside += [f"|Δlogprob| {small(abs(first.delta_logprob))}"] if first.delta_logprob is not None else []
    beside += [first.tie] if first.tie not in ("", "none") else []
    beside += [f"reference gap {small(first.gap)}"] if first.gap is not None else []
    position = number(first.position)
    where = f"request {first.request or 'not recorded'}{sample}, position {position}"
    return f"{where}: {change}" + (f" ({', '.join(beside)})" if beside else "")


def size_words(diagnosis: Diagnosis | None) -> str:
    """How large a difference is."""
    if diagnosis is None:
        return "not measured"
    parts = []
    if diagnosis.max_ulp is not None:
        parts.append(f"at most {diagnosis.max_ulp:,} ulp")
    if diagnosis.max_abs_delta_logprob is not None:
        parts.append(f"|Δlogprob| at most {small(diagnosis.max_abs_delta_logprob)}")
    estimates = [
        f"{small(value)} ({name})"
        for name, value in (("k1", diagnosis.kl_k1), ("k3", diagnosis.kl_k3))
        if value is not None
    ]
    parts += [f"KL about {', '.join(estimates)}"] if estimates else []
    return "; ".join(parts) or "not measurable in these fields"


def layer_words(verdict: Verdict) -> str:
    """The layer a difference is put down to, and why."""
    if verdict.diagnosis is None or not verdict.diagnosis.layer:
        return f"not diagnosed; the axis belongs to {verdict.axis.home_layer or 'no layer on record'}"
    return (
        f"{verdict.diagnosis.layer}: {verdict.diagnosis.reason}"
        if verdict.diagnosis.reason
        else (verdict.diagnosis.layer)
    )


def is_weak(verdict: Verdict) -> bool:
    """Whether a good verdict rests on a corpus that says little."""
    return verdict.verdict in ("PASS", "APPROVED") and verdict.corpus.weak != ""


def weak_words(verdict: Verdict) -> str:
    """The warning beside a PASS over a weak corpus; empty when there is none."""
    if not is_weak(verdict):
        return ""
    reason = verdict.corpus.weak
    return reason if reason.startswith("weak") else f"weak corpus: {reason}"


def notes(verdict: Verdict) -> tuple[str, ...]:
    """What bounds a verdict: a weak corpus, and what unknown fields keep it from saying."""
    weak = weak_words(verdict)
    return (weak, *verdict.caps) if weak else verdict.caps


def failure_lines(verdict: Verdict) -> tuple[str, ...]:
    """At most five lines: what differs, where first, how many, what size, which layer.

    An ERROR shows the end of its log in their place; INSUFFICIENT what is missing; other verdicts their reason.
    """
    head = f"{verdict.label} {verdict_words(verdict)} ({axis_words(verdict)}, rule {verdict.rule})"
    if verdict.verdict == "FAIL":
        return _lines(f"{head}: {field_words(verdict.comparison) or verdict.reason}", _difference(verdict))
    if verdict.verdict == "ERROR":
        return _lines(head, _failure(verdict))
    if verdict.verdict == "INSUFFICIENT":
        return _lines(head, _missing(verdict))
    return _lines(f"{head}: {verdict.reason}", [])


def _difference(verdict: Verdict) -> list[tuple[str, str]]:
    diagnosis = verdict.diagnosis
    return [
        ("first", first_words(diagnosis.first if diagnosis else None)),
        ("how many", spread_words(verdict)),
        ("size", size_words(diagnosis)),
        ("layer", layer_words(verdict)),
    ]


def _failure(verdict: Verdict) -> list[tuple[str, str]]:
    tail = verdict.error.log_tail[-3:] if verdict.error else ()
    message = verdict.error.message if verdict.error else ""
    return [("reason", message or verdict.reason), *(("log", line) for line in tail)]


def _missing(verdict: Verdict) -> list[tuple[str, str]]:
    shown, more = verdict.undeclared[:3], len(verdict.undeclared) - 3
    undeclared = "; ".join(shown) + (f"; {more} more" if more > 0 else "")
    return [
        ("missing", verdict.reason),
        ("compared", f"{compared_words(verdict.comparison)}; {witnessed_words(verdict.comparison)}"),
        ("control", control_words(verdict.control)),
        ("changed", undeclared) if undeclared else ("floor", floor_words(verdict.floor)),
    ]


def _lines(head: str, labelled: list[tuple[str, str]]) -> tuple[str, ...]:
    return (one_line(head), *(f"  {label:<9} {one_line(text)}" for label, text in labelled))


def one_line(text: str, limit: int = _LINE) -> str:
    """The text on one line, cut at `limit` characters with an ellipsis."""
    joined = " ".join(text.split())
    return joined if len(joined) <= limit else joined[: limit - 1] + "…"


def count(amount: int | None, noun: str) -> str:
    """`1 request`, `12 requests`, or that the number is not recorded."""
    if amount is None:
        return f"{noun}s not recorded"
    return f"{amount:,} {noun}" if amount == 1 else f"{amount:,} {noun}s"


def number(amount: int | None) -> str:
    """A whole number with separators, or `not recorded`."""
    return "not recorded" if amount is None else f"{amount:,}"


def small(value: float) -> str:
    """A number of few digits: `0`, `0.0125`, `2.1e-06`, `nan`."""
    return f"{value:.3g}"
