"""The plan: cases shared by content, forced cases after their references, nothing left out silently."""

import dataclasses

import pytest

from harness import registry
from harness.cell import Requires
from harness.choose import choose_plan
from harness.errors import UsageError
from harness.matrix import load_matrix
from harness.plan import Subject, make_plan, slug
from harness.requires import unmet_requirement
from harness.stages import order_stages


@pytest.fixture(scope="module")
def plan():
    return choose_plan(["quick"], engine="bundled", model="tiny", mode=None, assignments=())


def test_every_cell_and_variant_is_a_pair(plan):
    assert [pair.label for pair in plan.pairs] == sorted(pair.label for pair in plan.pairs)
    assert len(plan.pairs) == 9
    assert all(pair.unsupported is None for pair in plan.pairs)


def test_cases_are_shared_by_content(plan):
    by_name = {pair.cell.name: pair for pair in plan.pairs}
    assert by_name["alone-vs-batch"].reference == by_name["arrivals-while-decoding"].reference
    assert by_name["arrival-order"].reference == by_name["process-restart"].reference
    wanted = sum(len(pair.cases) for pair in plan.pairs)
    assert len(plan.cases) < wanted


def test_a_forced_case_runs_after_its_reference(plan):
    order = [case for stage in plan.stages for case in stage.cases]
    assert sorted(order) == sorted(plan.cases)
    for case_id, case in plan.cases.items():
        if case.golden is not None:
            assert order.index(case.golden) < order.index(case_id)


def test_a_floor_stays_in_the_lifetime_of_its_reference(plan):
    stage_of = {case: index for index, stage in enumerate(plan.stages) for case in stage.cases}
    for pair in plan.pairs:
        assert stage_of[pair.reference] == stage_of[pair.floor]
        assert plan.cases[pair.reference].repetition == 0
        assert plan.cases[pair.floor].repetition == 1


def test_both_sides_of_a_restart_are_two_lifetimes_of_one_configuration(plan):
    pair = next(pair for pair in plan.pairs if pair.cell.name == "process-restart")
    before, after = plan.cases[pair.reference].lifetime, plan.cases[pair.varied].lifetime
    assert dataclasses.replace(after, ordinal=0) == before
    assert after != before
    tuned = dict(plan.cases[pair.control_varied].lifetime.settings)
    assert (tuned["arithmetic"], tuned["tuning"]) == ("free", 1)
    assert dict(plan.cases[pair.control_reference].lifetime.settings)["tuning"] == 0


def test_controls_run_on_the_first_requests(plan):
    for pair in plan.pairs:
        assert plan.cases[pair.control_reference].requests == plan.cases[pair.reference].requests[:4]


def test_lifetimes_that_wait_for_each_other_are_split(plan):
    """a's forced case needs b's natural one and the other way round."""
    natural = [case for case in plan.cases.values() if case.golden is None][:1][0]
    a = dataclasses.replace(natural, lifetime=dataclasses.replace(natural.lifetime, ordinal=5))
    b = dataclasses.replace(natural, lifetime=dataclasses.replace(natural.lifetime, ordinal=6))
    a_forced = dataclasses.replace(a, replay="golden", golden=b.id)
    b_forced = dataclasses.replace(b, replay="golden", golden=a.id)
    cases = {case.id: case for case in (a, b, a_forced, b_forced)}
    stages = order_stages(cases)
    order = [case for stage in stages for case in stage.cases]
    assert sorted(order) == sorted(cases)
    assert order.index(b.id) < order.index(a_forced.id)
    assert order.index(a.id) < order.index(b_forced.id)
    assert len(stages) == 3


def test_a_plan_forced_along_a_case_it_lacks_is_refused(plan):
    case = next(case for case in plan.cases.values() if case.golden is not None)
    with pytest.raises(UsageError, match="forced along cases it does not hold"):
        order_stages({case.id: case})


def test_part_of_a_plan_keeps_what_its_pairs_need(plan):
    part = plan.only(["seeded-natural[alone-together]"])
    assert [pair.label for pair in part.pairs] == ["seeded-natural[alone-together]"]
    assert set(part.cases) == set(part.pairs[0].cases)


def test_what_the_engine_does_not_offer_is_planned_as_unsupported():
    class Narrow(type(registry.adapter("bundled"))):
        name = "narrow"

        def axes(self):
            return {name: axis for name, axis in super().axes().items() if name != "batch"}

        def strongest_rule(self):
            return "tokens"

    matrix = dataclasses.replace(load_matrix("quick"), allow_unsupported=("arrival-order",))
    plan = make_plan(matrix, Subject(adapter=Narrow(), model="tiny", overrides={}))
    reasons = {pair.cell.name: (pair.unsupported, pair.foreseen) for pair in plan.pairs}
    assert reasons["alone-vs-batch"] == ("engine 'narrow' does not offer the axis 'batch'", False)
    assert "judged under 'tokens' at most" in reasons["max-num-seqs"][0]
    assert reasons["arrival-order"][1] is True
    assert plan.cases == {}


@pytest.mark.parametrize(
    ("requires", "message"),
    [
        (Requires(engines=("vllm",)), "the cell is for vllm, the engine is bundled"),
        (Requires(packages=("no_such_package",)), "package 'no_such_package' is not installed"),
        (Requires(programs=("no-such-program",)), "program 'no-such-program' is not on the PATH"),
        (Requires(cores=3), "3 cores are needed, 2 are usable"),
        (Requires(accelerators=1), "accelerator"),
        (Requires(cpu_flags=("no_such_flag",)), "this CPU lacks no_such_flag"),
        (Requires(devices=("cpu",)), "device=cpu alone; this run has device=cuda"),
        (Requires(devices=("cpu", "cuda")), None),
        (Requires(), None),
    ],
)
def test_requirements(requires, message):
    found = unmet_requirement(requires, "bundled", 2, {"device": "cuda"})
    assert found is None if message is None else message in found


def test_thread_cells_are_foreseen_to_be_unsupported_on_a_gpu():
    for matrix, prefix in (("quick", ""), ("ragged", "ragged-")):
        plan = make_plan(
            load_matrix(matrix),
            Subject(adapter=registry.adapter("bundled"), model="tiny", overrides={"device": "cuda"}),
        )
        found = {pair.cell.name: (pair.unsupported, pair.foreseen) for pair in plan.pairs}
        assert found[f"{prefix}thread-count"][1] is True
        assert "device=cpu alone; this run has device=cuda" in found[f"{prefix}thread-count"][0]
        assert found[f"{prefix}alone-vs-batch"] == (None, False)


def test_an_engine_without_devices_fits_any():
    assert unmet_requirement(Requires(devices=("cpu",)), "vllm", 2, {}) is None


def test_labels_need_no_shell_quoting():
    assert slug("smoke:2") == "smoke.2"
    assert slug("while-decoding") == "while-decoding"
    assert slug(True) == "true"
    assert slug("a b/$c") == "a.b..c"


def test_settings_from_the_command_line_reach_every_case():
    plan = choose_plan(["quick"], engine="bundled", model="tiny", mode="free", assignments=("page_size=8",))
    for case in plan.cases.values():
        assert dict(case.lifetime.settings)["page_size"] == 8
        assert dict(case.lifetime.settings)["arithmetic"] == "free"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"matrices": ["quick"], "cells": ["alone-vs-bach"]}, "did you mean 'alone-vs-batch'"),
        ({"matrices": ["quick"], "engine": "bundeld"}, "did you mean 'bundled'"),
        ({"matrices": ["quick"], "mode": "exact"}, "has no mode 'exact'"),
        ({"matrices": ["quick", "quick"]}, "must be unique"),
    ],
)
def test_what_cannot_be_planned_is_refused(changes, message):
    options = {"engine": "bundled", "model": "tiny", "mode": None, "assignments": (), **changes}
    matrices = options.pop("matrices")
    with pytest.raises(UsageError, match=message):
        choose_plan(matrices, **options)


def test_cells_for_a_gpu_are_foreseen_to_be_unsupported_without_one_and_planned_with_one(monkeypatch):
    subject = Subject(adapter=registry.adapter("bundled"), model="tiny", overrides={})
    monkeypatch.setattr("harness.requires.count_accelerators", lambda: 0)
    reasons = {(pair.unsupported, pair.foreseen) for pair in make_plan(load_matrix("gpu"), subject).pairs}
    assert reasons == {("1 accelerator(s) needed, this host shows none", True)}
    monkeypatch.setattr("harness.requires.count_accelerators", lambda: 1)
    plan = make_plan(load_matrix("gpu"), subject)
    assert {pair.unsupported for pair in plan.pairs} == {None}
    settings = {name: dict(case.lifetime.settings) for name, case in plan.cases.items()}
    both = [pair for pair in plan.pairs if pair.cell.axis.name == "device"]
    references = {name for pair in both for name in (pair.reference, pair.floor)}
    references |= {name for pair in both for name in (pair.control_reference, pair.control_floor)}
    assert len(both) == 2
    assert {name for name, one in settings.items() if one["device"] == "cpu"} == references
    assert {one["device"] for one in settings.values()} == {"cpu", "cuda"}
    lifetimes = settings.values()
    assert {one["arithmetic"] for one in lifetimes} == {"portable", "tensorcore", "free", "native"}
