"""Cells whose reference is a baseline: every step of the judgement, and the driver's cell with edited fingerprints."""

import dataclasses
import json

import numpy as np
import pytest
from release_making import samebits, traces

from harness.axis import AXES
from harness.baseline.drift import NO_SUSPECT, Accepted
from harness.baseline.entry import Baseline, Key
from harness.baseline.environment import References, judge_environment
from harness.baseline.table import read_table, write_table
from harness.capture import Capture
from harness.cell import parse_cell
from harness.digest import judged_digest
from harness.engine import Field
from harness.errors import CellError
from harness.fingerprint import fingerprint_of
from harness.lifetime import Failure
from harness.matrix import load_matrix
from harness.plan import Pair
from harness.schedules import AXIS_VALUES, ENVIRONMENT_AXES
from harness.verdict import VerdictName

LABEL = "driver[baseline-now]"
TABLE = {
    "name": "driver", "invariant": "Drivers come and go.", "corpus": "quick", "rule": "topk", "replay": "natural",
    "axis": {"name": "driver", "reference": "baseline", "variants": ["now"]}, "control": {"mode": "free"},
}  # fmt: skip


def pair(**changes):
    cell, mistakes = parse_cell(TABLE | changes)
    assert mistakes == ()
    return Pair(
        cell=cell,
        variant="now",
        label=LABEL,
        owned=cell.axis.fields,
        control_owned=(),
        varied="now",
        floor="again",
        control_varied="free",
        control_floor="free again",
    )


def fields(driver="570", **others):
    work = {f"work.{name}": name for name in ("corpus", "schedule")}
    values = {"accelerator.driver": driver, "package.torch": "2.13", **work, **others}
    return tuple(Field(name=name, value=value, field_class="identity", source="test") for name, value in values.items())


def capture(case, made, subject, process="p"):
    return Capture(
        case=case,
        traces=made,
        requested={},
        resolved={},
        observed={},
        subject=subject,
        process_nonce=process,
        repetition_nonce=case,
        session="s",
        judged_digest=judged_digest(made),
        seconds=0.1,
    )


def moved(seed=0):
    made = traces(seed=seed)
    made.positions.logprob.view(np.uint32)[3] ^= 1
    return made


def captures(now=None, again=None, free=None, free_again=None, driver="580", **others):
    subject = fields(driver, **others)
    return {
        "now": capture("now", now or traces(), subject),
        "again": capture("again", again or now or traces(), subject),
        "free": capture("free", free or moved(), subject, "q"),
        "free again": capture("free again", free_again or free or moved(), subject, "q"),
    }


def accepted(made=None, driver="570", work=None):
    made = made or traces()
    baseline = Baseline(
        key=Key(engine="e", model="m", cell="driver", variant="baseline-now"),
        rule="topk",
        judged_digest=judged_digest(made),
        requests=2,
        positions=5,
        kept=("logprobs",),
        work=work or {"corpus": "corpus", "schedule": "schedule"},
        verdict="PASS",
        floor="the variant twice: 5 positions same",
        control="differs",
        author="alice",
        reason="first",
        accepted="2026-03-01T00:00:00Z",
        run_started="",
        run_digest="",
        table="",
        fingerprint="",
        previous=None,
    )
    return Accepted(baseline=baseline, fingerprint=lambda: fingerprint_of(fields(driver)),
                    table=lambda: read_table(write_table(made, ("logprobs",))))  # fmt: skip


def judged(found, base=None, *, nightly=False, cell=None):
    references = References(accepted={} if base is None else {LABEL: base}, nightly=nightly)
    return judge_environment(cell or pair(), found, references)


def test_another_driver_and_the_same_bits_pass_and_say_what_changed():
    verdict = judged(captures(), accepted())
    assert verdict.verdict is VerdictName.PASS
    assert verdict.reason == "same bits as the baseline at 5 positions; changed: accelerator.driver: 570 -> 580"
    assert verdict.claims[-1] == "control free fired: 1 of 2 requests differ from the baseline"
    assert verdict.comparison.positions == 5


def test_other_bits_fail_whatever_changed_and_the_changed_fields_are_suspects():
    verdict = judged(captures(now=moved()) | {"free": capture("free", traces(seed=3), fields("580"), "q"),
                                               "free again": capture("free again", traces(seed=3), fields("580"), "q")},
                     accepted())  # fmt: skip
    assert verdict.verdict is VerdictName.FAIL
    assert verdict.reason.startswith("1 of 2 requests differ from the baseline, first in request 'r1' at position 0")
    assert verdict.diagnosis.layer == "environment"
    assert verdict.diagnosis.reason == "changed since the baseline: accelerator.driver: 570 -> 580"
    assert (verdict.diagnosis.first.request, verdict.diagnosis.first.position) == ("r1", 0)
    assert "at most 1 ulp" in verdict.diagnosis.text


def test_other_bits_in_an_unchanged_environment_are_a_fault_of_engine_or_fingerprint():
    verdict = judged(captures(now=moved(), driver="570"), accepted())
    assert (verdict.verdict, verdict.diagnosis.reason) == (VerdictName.FAIL, NO_SUSPECT)


def test_an_unchanged_environment_puts_nothing_to_the_test_except_in_a_nightly():
    verdict = judged(captures(driver="570"), accepted())
    assert verdict.verdict is VerdictName.INSUFFICIENT
    assert "nothing that the axis 'driver' owns changed since the baseline of 2026-03-01" in verdict.reason
    nightly = judged(captures(driver="570"), accepted(), nightly=True)
    assert (nightly.verdict, nightly.reason) == (VerdictName.PASS, "unchanged environment, same bits")


def test_a_change_that_is_not_the_axis_own_is_no_witness():
    verdict = judged(captures(driver="570", **{"package.torch": "2.14"}), accepted())
    assert verdict.verdict is VerdictName.INSUFFICIENT
    nightly = judged(captures(driver="570", **{"package.torch": "2.14"}), accepted(), nightly=True)
    assert nightly.reason == "same bits as the baseline at 5 positions; what changed is not this axis's"


def test_no_baseline_yet_is_insufficient_and_says_how_to_accept_one():
    verdict = judged(captures())
    assert verdict.verdict is VerdictName.INSUFFICIENT
    assert verdict.reason.startswith("no baseline yet; accept one with `samebits baseline accept RUN --cell driver")
    assert (verdict.floor.verdict, verdict.control.fired) == ("same", True)


@pytest.mark.parametrize("nightly", [True, False])
def test_a_floor_that_differs_fails_before_any_baseline_is_looked_at(nightly):
    verdict = judged(captures(again=moved()), accepted(), nightly=nightly)
    assert (verdict.verdict, verdict.reason.partition(":")[0]) == (VerdictName.FAIL, "run-to-run")


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"free": traces()}, "the control stayed silent: nothing differs"),
        ({"free_again": traces(seed=5)}, "the control stayed silent: its own floor differs: noise is not a control"),
    ],
)
def test_a_silent_or_noisy_control_is_insufficient(changes, sentence):
    verdict = judged(captures(**changes), accepted())
    assert (verdict.verdict, verdict.reason) == (VerdictName.INSUFFICIENT, sentence)


def test_a_control_that_could_not_run_is_silent():
    found = captures() | {"free": Failure(kind="error", message="crashed", log_tail=())}
    assert judged(found, accepted()).reason == "the control stayed silent: could not run: variant: crashed"


def test_a_baseline_of_another_schedule_is_insufficient():
    verdict = judged(captures(), accepted(work={"corpus": "corpus", "schedule": "other"}))
    assert verdict.verdict is VerdictName.INSUFFICIENT
    assert verdict.reason == "the baseline was made with another schedule; accept a new one"


def test_too_few_positions_are_insufficient():
    verdict = judged(captures(), accepted(), cell=pair(minimum=6))
    assert verdict.reason == "no PASS without a witness: 5 positions, 6 needed"


@pytest.mark.parametrize(
    ("changes", "name", "reason"),
    [
        ({"now": None}, "ERROR", "the variant was planned but not captured"),
        ({"now": Failure(kind="error", message="crashed", log_tail=())}, "ERROR", "variant: crashed"),
        ({"again": Failure(kind="unsupported", message="no", log_tail=())}, "UNSUPPORTED", "floor: no"),
    ],
)
def test_what_was_not_captured_is_no_verdict_about_bits(changes, name, reason):
    verdict = judged({key: item for key, item in (captures() | changes).items() if item is not None}, accepted())
    assert (verdict.verdict, verdict.reason) == (VerdictName(name), reason)


def test_a_copied_floor_or_one_of_another_process_is_an_error():
    found = captures()
    copied = found | {"again": dataclasses.replace(found["now"], case="again")}
    assert "it is a copy, not a capture" in judged(copied, accepted()).reason
    apart = found | {"again": dataclasses.replace(found["again"], process_nonce="z")}
    assert "both belong into one lifetime" in judged(apart, accepted()).reason


def test_a_capture_that_lacks_the_rules_evidence_is_an_error():
    made = traces()
    bare = dataclasses.replace(made, positions=dataclasses.replace(made.positions, topk_ids=None, topk_logprobs=None))
    assert judged(captures(now=bare, again=bare), accepted()).verdict is VerdictName.ERROR


def test_the_axes_values_and_cells_agree():
    axes = {name for name, axis in AXES.items() if axis.kind == "environment"}
    assert axes == set(ENVIRONMENT_AXES) == {cell.axis.name for cell in load_matrix("environment").cells}
    assert all(AXES[name].fields and AXIS_VALUES[name] == ("baseline", "now") for name in axes)


def test_a_cell_on_such_an_axis_cannot_be_golden_or_planted():
    for changes, place in (({"replay": "golden"}, "$.replay"), ({"control": {"planted": "one-ulp"}}, "$.control")):
        _, mistakes = parse_cell(TABLE | changes)
        assert any(mistake.startswith(place) for mistake in mistakes)
    _, mistakes = parse_cell(TABLE | {"axis": {"name": "driver", "reference": "now", "variants": ["then"]}})
    assert any("expected one of baseline, now" in mistake for mistake in mistakes)
    with pytest.raises(CellError):
        load_matrix("environmental")


def test_the_driver_cell_end_to_end_with_an_edited_fingerprint(tmp_path):
    """A run whose baseline was made under another driver: the same bits pass, and the driver is named."""
    from harness.baseline.shelf import Shelf

    run, url = tmp_path / "run", str(tmp_path / "baselines")
    command = ("run", "environment", "--cell", "driver", "--engine", "fake", "--quiet")
    first = samebits(*command, "--out", run)
    assert (first.code, "INSUFFICIENT" in first.out) == (3, True)
    assert samebits("baseline", "accept", run, "--reason", "first", "--author", "alice", "--baselines", url).code == 0
    shelf = Shelf(url)
    (key,) = shelf.keys()
    baseline = shelf.newest(key)
    edited = fingerprint_of([
        dataclasses.replace(field, value="NVIDIA 550.1 (open)") if field.name == "accelerator.driver" else field
        for field in shelf.fingerprint(baseline).fields
    ])  # fmt: skip
    digest = shelf.folder.put(json.dumps(edited.to_json()).encode(), ".json")
    shelf.replace(dataclasses.replace(baseline, fingerprint=digest))
    again = samebits(*command, "--out", tmp_path / "again", "--baselines", url)
    verdict = json.loads((tmp_path / "again" / "run.json").read_text())["verdicts"][0]
    assert (again.code, verdict["verdict"]) == (0, "PASS"), verdict["reason"]
    assert "changed: accelerator.driver: NVIDIA 550.1 (open) -> " in verdict["reason"]
    drifted = samebits(*command, "--out", tmp_path / "drifted", "--baselines", url, "--set", "invariant=false")
    verdict = json.loads((tmp_path / "drifted" / "run.json").read_text())["verdicts"][0]
    assert (drifted.code, verdict["verdict"]) == (1, "FAIL")
    assert "config.invariant: true -> false" in verdict["diagnosis"]["reason"]
