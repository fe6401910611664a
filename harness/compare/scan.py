"""Walks two captures once per field and finds the positions at which they differ.

It does not know how differences are reported or judged. Rules: in natural replay a request is walked to its first
differing token and no further, in golden replay to the shorter side's end; a golden variant that left its forced path
is an error; so is a position without candidates, or without a pick, where the rule compares them.

Positions are numbers of the reference's judged layout (`harness.judged`), ascending.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np

from harness.compare.columns import Run, differing_rows, join_runs
from harness.compare.fields import FieldName, find_listed, operands, position_fields
from harness.compare.pairs import find_places
from harness.engine import Replay, Rule
from harness.judged import Alignment, ComparisonError
from harness.traces import NO_TOKEN, Int64, Traces


class Scan(NamedTuple):
    """Two captures lined up under a rule."""

    reference: Traces
    variant: Traces
    alignment: Alignment
    rule: Rule
    replay: Replay

    @property
    def choice(self) -> Literal["token", "pick"]:
        """The column that holds what a side chose."""
        return "pick" if self.replay == "golden" else "token"

    def runs(self, counts: Int64) -> tuple[Run, ...]:
        """The first `counts[j]` positions of each request, as runs of rows."""
        ref, var = self.alignment.reference, self.alignment.variant
        return join_runs(ref.starts, var.starts, ref.offsets[:-1], counts)

    def rows(self, field: FieldName, runs: tuple[Run, ...]) -> Int64:
        """Numbers of the positions at which a field differs."""
        sides = operands(field, self.reference.positions, self.variant.positions, self.rule)
        return differing_rows(*sides, runs)

    def place(self, number: int) -> str:
        """A position of the judged layout in words."""
        j, position = self.alignment.reference.locate(number)
        return f"request {self.alignment.keys[j]} position {position}"


Found = dict[FieldName, Int64]  # differing positions of each compared field, as numbers of the judged layout


def find_comparable(scan: Scan) -> Int64:
    """How many positions of each request both sides generated in the same context, (J,).

    Raises ComparisonError if a golden variant left the path it was forced along.
    """
    common = np.minimum(scan.alignment.reference.lengths, scan.alignment.variant.lengths)
    tokens = scan.rows("token", scan.runs(common))
    if not tokens.size:
        return common
    if scan.replay == "golden":
        place = find_places(scan.alignment, tokens[:1])
        expected = int(scan.reference.positions.token[place.reference[0]])
        got = int(scan.variant.positions.token[place.variant[0]])
        raise ComparisonError(
            f"variant: {scan.place(int(tokens[0]))}: the forced path has token {expected}, the engine reports {got}; "
            "golden replay was not followed, so nothing after it is comparable"
        )
    offsets = scan.alignment.reference.offsets
    requests = np.searchsorted(offsets, tokens, side="right") - 1
    first, where = np.unique(requests, return_index=True)
    limits = common.copy()
    limits[first] = tokens[where] - offsets[first] + 1
    return limits


def find_differing(scan: Scan, runs: tuple[Run, ...]) -> Found:
    """The differing positions of every field the rule compares, within the runs."""
    fields = [field for field in position_fields(scan.rule) if (field, scan.replay) != ("token", "golden")]
    found = {field: scan.rows(field, runs) for field in fields}
    if "logprob" in found and "token" in found:  # other tokens' logprobs are no counterpart
        found["logprob"] = np.setdiff1d(found["logprob"], found["token"], assume_unique=True)
    return found


def count_elements(scan: Scan, found: Found, compared: dict[FieldName, int], runs: tuple[Run, ...]) -> int:
    """Ids, float bit patterns and digests compared. Raises ComparisonError where a side lists nothing to compare."""
    elements = compared[scan.choice] + compared.get("logprob", 0) + compared.get("tensors", 0)
    if scan.replay == "golden":
        _count_listed(scan, "pick", found, runs)
    if "topk_ids" in found:
        elements += 2 * _count_listed(scan, "topk_ids", found, runs)
    return elements


def _count_listed(scan: Scan, field: FieldName, found: Found, runs: tuple[Run, ...]) -> int:
    ids, variant_ids = operands(field, scan.reference.positions, scan.variant.positions, scan.rule)
    listed = find_listed(ids, runs)
    if listed.missing.size:
        raise _nothing_listed(scan, "reference", field, int(listed.missing[0]))
    rows = find_places(scan.alignment, found[field]).variant  # where the ids agree, the variant lists them too
    missing = np.flatnonzero(variant_ids[rows, 0] == NO_TOKEN)
    if missing.size:
        raise _nothing_listed(scan, "variant", field, int(found[field][missing[0]]))
    return listed.ids


def _nothing_listed(scan: Scan, side: str, field: FieldName, number: int) -> ComparisonError:
    what = {"pick": "reports no pick of its own sampler", "topk_ids": "lists no candidates"}[field]
    return ComparisonError(
        f"{side}: {scan.place(number)}: {what}, which {scan.replay} replay under rule {scan.rule!r} compares; "
        "ask for logprobs, or judge under a weaker rule"
    )
