"""The indicative line: what it compares, and when there is nothing to compare."""

import dataclasses
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from harness.capture import Capture
from harness.cost.indicative import indicative_line

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "release"))
from release_making import traces


def capture(seconds, lengths=(3, 3, 3)):
    made = traces(lengths)
    times = made.requests.arrival_s + seconds
    table = dataclasses.replace(made.requests, finish_s=times)
    values = dict.fromkeys(field.name for field in dataclasses.fields(Capture))
    return Capture(**{**values, "traces": dataclasses.replace(made, requests=table)})


def case(schedule="alone", replay="natural"):
    return SimpleNamespace(schedule=SimpleNamespace(name=schedule), replay=replay)


def plan(kind="mode", **cases):
    control = SimpleNamespace(kind=kind, mode="free")
    pair = SimpleNamespace(cell=SimpleNamespace(control=control), reference="r", floor="f", control_reference="c")
    return SimpleNamespace(pairs=(pair, pair), cases={"r": case(), "f": case(), "c": case(), **cases})


CAPTURES = {"r": capture(1.2), "f": capture(1.8), "c": capture(1.0, lengths=(3, 3))}


def test_the_same_answers_alone_are_compared_once():
    line = indicative_line(plan(), CAPTURES)
    assert line.startswith("indicative only: 1.20 to 1.80 times the time of mode free over 2 answers, each alone")


def test_what_is_too_short_gives_no_ratio():
    line = indicative_line(plan(), {name: capture(0.2, lengths=(3, 3)) for name in CAPTURES})
    assert line.startswith("indicative only: 2 answers in 0.40 s of mode free are too short to say")


@pytest.mark.parametrize(("planned", "captures"), [
    (plan(kind="planted"), CAPTURES),
    (plan(c=case("together")), CAPTURES),
    (plan(f=case(replay="golden")), CAPTURES),
    (plan(), {**CAPTURES, "c": SimpleNamespace(message="crashed")}),
    (plan(), {**CAPTURES, "c": capture(1.0, lengths=(2, 2))}),
    (plan(), {**CAPTURES, "c": capture(0.0)}),
])  # fmt: skip
def test_nothing_to_compare_is_no_line(planned, captures):
    assert indicative_line(planned, captures) is None
