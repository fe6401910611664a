"""Backgrounds: drawn from a seed, complete schedules, written down and replayed, and planned beside judged requests."""

import dataclasses
import json

import pytest

from engines.arrivals import check_schedule
from engines.fake import FakeAdapter
from harness.background import SHAPES, background_mistake, build_background, read_background
from harness.cell import parse_cell
from harness.corpus import load_corpus
from harness.errors import CorpusError
from harness.matrix import Matrix, load_matrix
from harness.plan import Subject, make_plan
from harness.run import write_backgrounds
from harness.schedule import Schedule


@pytest.fixture(scope="module")
def source():
    return load_corpus("random").requests


@pytest.mark.parametrize("shape", SHAPES)
def test_a_background_is_its_name_and_can_be_run(source, shape):
    one = build_background(f"{shape}:1", source)
    assert one == build_background(f"{shape}:1", source)
    assert one.requests != build_background(f"{shape}:2", source).requests
    check_schedule(Schedule(name=shape, arrivals=one.arrivals), [request.id for request in one.requests])
    assert all(arrival.companion for arrival in one.arrivals)
    assert all(request.sampling.temperature == 0 for request in one.requests)


def test_shapes_are_what_they_say(source):
    steps = [one.at_step for one in build_background("bursts:1", source).arrivals]
    assert [steps.count(step) for step in sorted(set(steps))] == [8, 8, 8]
    leaving, staying = (build_background(f"{shape}:5", source) for shape in ("cancellations", "stay"))
    assert leaving.requests == staying.requests
    assert {arrival.cancel_after_tokens for arrival in staying.arrivals} == {None}
    leave = [arrival.cancel_after_tokens for arrival in leaving.arrivals]
    assert 8 <= sum(after is not None for after in leave) < len(leave)
    assert all(after is None or 1 <= after < request.sampling.max_tokens
               for after, request in zip(leave, leaving.requests, strict=True))  # fmt: skip
    steady, rush = (build_background(f"{shape}:1", source) for shape in ("steady", "rush"))
    assert steady.requests == rush.requests
    assert steady.arrivals[-1].at_step > 2 * rush.arrivals[-1].at_step
    lengths = [len(request.prompt_token_ids) for request in build_background("lengths:1", source).requests]
    assert max(lengths) >= 300
    assert sum(length < 20 for length in lengths) > len(lengths) / 2
    agents = {one.id: one.prompt_token_ids for one in build_background("agents:1", source).requests}
    assert agents["agent-1-2"][: len(agents["agent-1-1"])] == agents["agent-1-1"]
    assert len({prompt[:320] for prompt in agents.values()}) == 3


def test_names_are_checked():
    assert [background_mistake(value) for value in ("none", "bursts:12", "file:a/b.json")] == [None] * 3
    for value in ("bursts", "burst:1", "bursts:-1", "bursts:x", "file:a.txt", ""):
        assert "SHAPE:SEED" in background_mistake(value)


def cell(reference="none", variants=("bursts:1",)):
    found, mistakes = parse_cell({
        "name": "under-load", "invariant": "i", "corpus": "smoke", "rule": "tokens", "replay": "natural",
        "axis": {"name": "load", "reference": reference, "variants": list(variants)}, "control": {"planted": "least"},
    })  # fmt: skip
    assert not mistakes, mistakes
    return found


def plan(tmp_path, **changes):
    matrix = Matrix(name="m", path=tmp_path, cells=(cell(**changes),), allow_unsupported=(), digest="")
    return make_plan(matrix, Subject(adapter=FakeAdapter(), model="fake", overrides={}))


def test_what_was_written_down_is_replayed_as_the_very_same_case(tmp_path):
    made = plan(tmp_path)
    write_backgrounds(made, tmp_path)
    file = tmp_path / "backgrounds" / "bursts.1.json"
    assert read_background(file) == made.backgrounds["bursts:1"]
    again = plan(tmp_path, variants=(f"file:{file}",))
    assert [pair.varied for pair in again.pairs] == [pair.varied for pair in made.pairs]
    case = made.cases[made.pairs[0].varied]
    assert sum(arrival.companion for arrival in case.schedule.arrivals) == 24
    assert {one.request for one in case.schedule.arrivals if not one.companion} == set(case.requests)


@pytest.mark.parametrize(("change", "message"), [
    ({"schema": 2}, "schema"), ({"arrivals": []}, "arrivals"), ({"requests": [{"id": 1}]}, "requests"),
    ({"arrivals": [{"request": "a"}]}, "exactly"),
])  # fmt: skip
def test_a_damaged_file_is_an_error_that_names_the_place(source, tmp_path, change, message):
    file = tmp_path / "b.json"
    file.write_text(json.dumps(build_background("steady:1", source).to_json() | change))
    with pytest.raises(CorpusError, match=message):
        read_background(file)
    judged = [dataclasses.asdict(one) | {"companion": False} for one in build_background("steady:1", source).arrivals]
    file.write_text(json.dumps(build_background("steady:1", source).to_json() | {"arrivals": judged}))
    with pytest.raises(CorpusError, match="never judged"):
        read_background(file)


def test_the_load_matrix_is_planned_for_the_engines_that_have_companions():
    matrix = load_matrix("load")
    assert {one.axis.name for one in matrix.cells} == {"load"}
    assert {one.name for one in matrix.cells} == {"scheduler-load", "clients-leave", "load-full-pool", "served-load"}
