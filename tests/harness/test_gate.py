"""The decision: every row of the exit-code table, and the highest that applies wins."""

import pytest

from harness.gate import decide
from harness.verdict import Verdict, VerdictName


def verdict(name, label="a[1-2]", **changes):
    return Verdict(cell="a", label=label, verdict=VerdictName(name), reason="because", **changes)


def several(*names):
    return [verdict(name, label=f"cell{i}[1-2]") for i, name in enumerate(names)]


@pytest.mark.parametrize(
    ("names", "planned", "code"),
    [
        (["PASS", "PASS"], 2, 0),
        (["PASS", "APPROVED"], 2, 0),
        (["PASS", "FAIL"], 2, 1),
        (["FAIL", "INSUFFICIENT"], 2, 1),
        (["PASS", "INSUFFICIENT"], 2, 3),
        (["PASS", "UNSUPPORTED"], 2, 3),
        (["PASS", "ERROR", "FAIL", "INSUFFICIENT"], 4, 4),
        (["PASS"], 2, 3),
        ([], 1, 3),
        ([], 0, 3),
    ],
)
def test_exit_codes(names, planned, code):
    assert decide(several(*names), planned)[0] == code


def test_a_foreseen_unsupported_is_green_only_beside_a_pass():
    foreseen = verdict("UNSUPPORTED", foreseen=True)
    assert decide([foreseen], 1)[0] == 3
    code, sentence = decide([foreseen, verdict("PASS", label="b[1-2]")], 2)
    assert code == 0
    assert sentence == "1 of 2 planned pairs PASS, 1 UNSUPPORTED as foreseen"


def test_an_expected_failure_is_kept_and_counts_as_zero():
    expected = verdict("FAIL", expected=VerdictName.FAIL)
    assert decide([expected], 1)[0] == 0
    assert decide([expected, verdict("FAIL", label="b[1-2]")], 2)[0] == 1


def test_the_sentence_names_the_cells():
    _, sentence = decide(several("PASS", "FAIL", "FAIL"), 3)
    assert sentence == "2 cells FAILED and nobody has signed for it: cell1[1-2], cell2[1-2]"
