"""From verdicts to one exit code and one sentence. Pure.

It does not know how verdicts are reached. Rules: the highest row of the table wins; an expected verdict counts as
kept; nothing judged is not green; 0 needs at least one PASS, or one verdict that its cell declares as its point.
"""

from __future__ import annotations

from collections.abc import Sequence

from harness.verdict import Verdict, VerdictName

OK, FAILED, USAGE, NOT_JUDGED, ENGINE, INTERRUPTED = 0, 1, 2, 3, 4, 130


def decide(verdicts: Sequence[Verdict], planned: int) -> tuple[int, str]:
    """(exit code, sentence) for a run that planned `planned` pairs."""
    open_ = [verdict for verdict in verdicts if verdict.expected is None]
    errors = _labels(open_, VerdictName.ERROR)
    failed = _labels(open_, VerdictName.FAIL)
    insufficient = _labels(verdicts, VerdictName.INSUFFICIENT)
    unforeseen = [v.label for v in open_ if v.verdict is VerdictName.UNSUPPORTED and not v.foreseen]
    if errors:
        return ENGINE, f"{_count(errors, 'cell')} ended in an engine ERROR: {', '.join(errors)}"
    if failed:
        return FAILED, f"{_count(failed, 'cell')} FAILED and nobody has signed for it: {', '.join(failed)}"
    if insufficient:
        return NOT_JUDGED, f"{_count(insufficient, 'cell')} INSUFFICIENT: {', '.join(insufficient)}"
    if len(verdicts) < planned:
        return NOT_JUDGED, f"{planned - len(verdicts)} of {planned} planned pairs were not judged"
    if unforeseen:
        return (
            NOT_JUDGED,
            f"UNSUPPORTED, and neither [requires] nor the matrix foresees it: {', '.join(unforeseen)}",
        )
    passed = [verdict for verdict in verdicts if verdict.verdict in (VerdictName.PASS, VerdictName.APPROVED)]
    kept = [verdict for verdict in verdicts if verdict.expected is not None]
    if not passed and not kept:
        return NOT_JUDGED, "nothing passed: every planned pair is UNSUPPORTED here"
    return OK, _all_well(verdicts, len(passed), len(kept))


def _all_well(verdicts: Sequence[Verdict], passed: int, kept: int) -> str:
    skipped = sum(verdict.verdict is VerdictName.UNSUPPORTED for verdict in verdicts)
    parts = [f"{passed} of {len(verdicts)} planned pairs PASS"]
    parts += [f"{kept} failed as declared"] if kept else []
    parts += [f"{skipped} UNSUPPORTED as foreseen"] if skipped else []
    return ", ".join(parts)


def left_out_words(cells: Sequence[str], matrix: str) -> str:
    """What of a matrix a run was not asked to judge, as the end of a sentence; empty for all of it."""
    if not cells:
        return ""
    return f"; {_count(cells, 'cell')} of matrix {matrix} left out by --cell"


def _labels(verdicts: Sequence[Verdict], name: VerdictName) -> list[str]:
    return [verdict.label for verdict in verdicts if verdict.verdict is name]


def _count(items: Sequence[str], noun: str) -> str:
    return f"{len(items)} {noun}{'' if len(items) == 1 else 's'}"
