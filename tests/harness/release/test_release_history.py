"""The history: no row is lost to concurrency or a crash, and a drift is put down to the run that brought it."""

import dataclasses
import json
import subprocess
import sys
from datetime import UTC, datetime

import pytest
from release_making import DIGEST, run_of, verdict

from harness.baseline.drift import NO_SUSPECT, Drift
from harness.engine import Field
from harness.fingerprint import field_records, fingerprint_of
from harness.release.attribution import attribute
from harness.release.decision import decide_gate
from harness.release.history import History
from harness.release.policy import Policy
from harness.release.trend import trend
from reports.trend import render_trend

NOW = datetime(2026, 3, 15, tzinfo=UTC)
LABEL = "restart[same-new]"


def night(number, bits="a", baseline="a", torch="1", *, hour=0):
    """(run, decision) of one night whose bits and torch are given."""
    subject = [Field(name="package.torch", value=torch, field_class="identity", source="test")]
    run = run_of(
        verdict(digests={"reference": DIGEST[bits], "floor": DIGEST[bits], "variant": DIGEST[bits]}),
        digest=f"{number:064x}", started=f"2026-03-{1 + number:02d}T{hour:02d}:00:00Z",
        fingerprint={"observer": [], "subject": field_records(subject)},
    )  # fmt: skip
    outcome = "same" if bits == baseline else "different"
    drift = Drift(outcome=outcome, sentence=outcome, old=DIGEST[baseline], new=DIGEST[bits])
    return run, decide_gate(run, {LABEL: drift}, (), Policy(), NOW)


@pytest.fixture
def history(tmp_path):
    return History(str(tmp_path / "history"))


def test_a_night_is_one_row_per_pair_and_appending_twice_is_appending_once(history):
    history.append(*night(1))
    history.append(*night(1))
    (row,) = history.read().nights
    assert (row.label, row.verdict, row.outcome, row.state) == (
        LABEL,
        "PASS",
        "PASS",
        "unchanged environment, same bits",
    )
    assert (row.judged_digest, row.baseline_digest, row.positions, row.exit_code) == (DIGEST["a"], DIGEST["a"], 288, 0)
    assert history.fingerprint(row.fingerprint).field("package.torch").value == "1"


def test_a_crash_in_the_middle_of_an_append_leaves_what_was_there(history, monkeypatch):
    history.append(*night(1))
    script = (
        "import os, sys; sys.path[:0] = sys.argv[2:]\n"
        "os.replace = lambda *_: os._exit(9)\n"
        "import test_release_history as t; from harness.release.history import History\n"
        "History(sys.argv[1]).append(*t.night(2))\n"
    )
    ended = subprocess.run([sys.executable, "-c", script, history.folder.url, *sys.path], check=False)
    assert ended.returncode == 9
    past = history.read()
    assert (len(past.nights), past.damaged) == (1, ())
    history.append(*night(2))
    assert len(history.read().nights) == 2


def test_concurrent_nightlies_lose_no_rows(history):
    script = (
        "import sys; sys.path[:0] = sys.argv[3:]\n"
        "import test_release_history as t; from harness.release.history import History\n"
        "for i in range(10): History(sys.argv[1]).append(*t.night(10 * int(sys.argv[2]) + i))\n"
    )
    running = [
        subprocess.Popen([sys.executable, "-c", script, history.folder.url, str(part), *sys.path]) for part in range(2)
    ]
    assert [process.wait() for process in running] == [0, 0]
    assert len({row.run for row in history.read().nights}) == 20


def test_a_damaged_or_foreign_file_is_named_and_the_rest_is_read(history, tmp_path):
    history.append(*night(1))
    parts = tmp_path / "history" / "parts"
    (good,) = parts.iterdir()
    (parts / "cut.parquet").write_bytes(good.read_bytes()[:100])
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"x": [1]}), parts / "foreign.parquet")
    past = history.read()
    assert len(past.nights) == 1
    assert [name.partition(":")[0] for name in past.damaged] == ["parts/cut.parquet", "parts/foreign.parquet"]
    assert "parts/cut.parquet" in render_trend(trend(history, past))


def onset(history, *nights):
    for item in nights:
        history.append(*item)
    return attribute(history.read().of("fake", "fake", LABEL), history.fingerprint)


def test_the_onset_is_the_first_night_after_the_last_good_one_with_the_fields_that_changed_there(history):
    found = onset(
        history, night(1), night(2), night(3, "b", torch="2"), night(4, "b", torch="2"), night(5, "b", torch="3")
    )
    assert (found.last_good.started, found.steps[0].started) == ("2026-03-03T00:00:00Z", "2026-03-04T00:00:00Z")
    assert found.steps[0].changed == ("package.torch: 1 -> 2",)
    assert len(found.steps) == 1
    assert found.sentence == (f"{LABEL}: drifts since the run of 2026-03-04T00:00:00Z (the last good one was "
                              "2026-03-03T00:00:00Z); changed: package.torch: 1 -> 2")  # fmt: skip


def test_a_drift_that_was_reverted_is_none_and_one_that_came_back_begins_anew(history):
    assert onset(history, night(1), night(2, "b", torch="2"), night(3)) is None
    found = onset(history, night(4, "b", torch="2"))
    assert found.steps[0].started == "2026-03-05T00:00:00Z"


def test_each_further_change_of_the_bits_is_a_step_and_no_changed_field_is_said(history):
    found = onset(history, night(1), night(2, "b", torch="2"), night(3, "d", torch="2"))
    assert [step.changed for step in found.steps] == [("package.torch: 1 -> 2",), ()]
    assert found.steps[1].sentence == NO_SUSPECT
    assert "the bits moved 1 more times since" in found.sentence


def test_a_night_that_captured_nothing_is_passed_over(history):
    history.append(*night(1))
    run, decision = night(2)
    nothing = dataclasses.replace(run.pairs[0], digests={})
    history.append(dataclasses.replace(run, pairs=(nothing,)), decision)
    found = onset(history, night(3, "b", torch="2"))
    assert found.last_good.started == "2026-03-02T00:00:00Z"


def test_a_drift_without_a_good_night_is_held_against_the_baseline(history):
    history.append(*night(1, "b", torch="2"))
    made = fingerprint_of([Field(name="package.torch", value="0", field_class="identity", source="test")])
    found = attribute(history.read().of("fake", "fake", LABEL), history.fingerprint, lambda: made)
    assert found.last_good is None
    assert found.sentence.endswith("changed: package.torch: 0 -> 2")


def test_a_newly_accepted_baseline_ends_the_drift(history):
    assert onset(history, night(1), night(2, "b", torch="2"), night(3, "b", baseline="b", torch="2")) is None


def test_the_trend_shows_marks_and_onsets_and_escapes(history):
    for item in (night(1), night(2, "b", torch="<2>")):
        history.append(*item)
    page = render_trend(trend(history, history.read()))
    assert "package.torch: 1 -&gt; &lt;2&gt;" in page
    assert 'class="drift"' in page
    assert "<2>" not in page
    json.dumps(trend(history, history.read()))
