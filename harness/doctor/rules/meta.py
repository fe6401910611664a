"""The doctor's own rules: files it cannot parse, suppressions without use or reason, and a live engine that differs."""

from __future__ import annotations

from collections.abc import Iterator

from harness.doctor.finding import Hit, Place, Rule, Severity
from harness.doctor.launch import Scan


def find_unparsable(scan: Scan) -> Iterator[Hit]:
    """Files that did not parse."""
    for document in scan.documents:
        if document.problem is not None:
            place = Place(document.path, document.problem.line)
            yield Hit(place, f"not read as {document.kind}: {document.problem.text}", document.path)


RULES = (
    Rule(
        id="unparsable",
        engine="any",
        severity=Severity.WARNING,
        title="A file that cannot be parsed",
        why="Nothing in it was checked, so silence about it means nothing.",
        mend="Repair the file, or exclude it by --exclude.",
        scan=find_unparsable,
    ),
    Rule(
        id="suppression-unused",
        engine="any",
        severity=Severity.WARNING,
        title="A suppression that suppresses nothing",
        why="It hides the next finding at this place, whatever that will be.",
        mend="Remove the comment.",
    ),
    Rule(
        id="suppression-no-reason",
        engine="any",
        severity=Severity.WARNING,
        title="A suppression without a reason",
        why="Nobody can tell later whether it still holds; it is not applied.",
        mend="Write: samebits: allow RULE reason.",
    ),
    Rule(
        id="live-differs",
        engine="any",
        severity=Severity.ERROR,
        title="The running engine differs from the files",
        why="What runs is not what the files say, so neither vouches for the other.",
        mend="Find where the value changes on its way: an override, a default, an engine that replaced it.",
    ),
)
