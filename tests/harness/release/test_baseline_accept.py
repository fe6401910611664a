"""Accepting baselines out of a run's folder: what is refused, what is kept, and how a run is held against them."""

import dataclasses
import json
from datetime import UTC, datetime

import numpy as np
import pytest
from release_making import DIGEST, record, samebits, traces, verdict

from harness.baseline.accept import Acceptance, accept
from harness.baseline.drift import NO_SUSPECT
from harness.baseline.entry import Key, read_baseline
from harness.baseline.shelf import Shelf
from harness.capture import Capture
from harness.digest import judged_digest
from harness.engine import Field
from harness.errors import StoreError, UsageError
from harness.finished import read_finished
from harness.release.held import hold
from harness.seal import sealed
from harness.store import Store

TERMS = Acceptance(author="alice", reason="first", moment=datetime(2026, 3, 1, tzinfo=UTC), keep=("logprobs",))
LABEL = "restart[same-new]"
KEY = Key(engine="fake", model="fake", cell="restart", variant="same-new")


def field(name, value, field_class="identity"):
    return Field(name=name, value=value, field_class=field_class, source="test")


def write_run(folder, made=None, *, torch="2.13.0", corpus="c", changes=None, extra=()):
    """A run's folder with one pair whose reference is captured."""
    made = made or traces()
    digest = judged_digest(made)
    work = [field(f"work.{name}", corpus if name == "corpus" else name) for name in
            ("companions", "corpus", "requests", "sampling", "schedule")]  # fmt: skip
    subject = (field("package.torch", torch), field("host.name", "alices-laptop", "context"), *work, *extra)
    folder.mkdir(parents=True)
    Store(folder / "captures").write(Capture(
        case="aa", traces=made, requested={}, resolved={}, observed={}, subject=subject, process_nonce="p",
        repetition_nonce="r", session="s", judged_digest=digest, seconds=0.1,
    ))  # fmt: skip
    row = verdict(digests={"reference": digest, "floor": digest, "variant": digest}) | (changes or {})
    (folder / "run.json").write_text(json.dumps(sealed(record(row))))
    return read_finished(folder)


@pytest.fixture
def shelf(tmp_path):
    return Shelf(str(tmp_path / "baselines"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"floor": None}, "it has no floor: the reference was not captured twice"),
        (
            {"floor": {"verdict": "different", "sentence": "the reference twice: 288 positions different"}},
            "its floor did not hold: the reference twice: 288 positions different",
        ),
        ({"control": None}, "it has no control, so nothing shows that it can fail"),
        (
            {"control": {"kind": "mode", "fired": False, "verdict": "nothing differs"}},
            "its control stayed silent: nothing differs",
        ),
        ({"verdict": "ERROR"}, "its verdict is ERROR"),
        ({"verdict": "UNSUPPORTED"}, "its verdict is UNSUPPORTED"),
    ],
)
def test_a_cell_without_a_floor_that_held_or_a_control_that_fired_is_refused(tmp_path, shelf, changes, message):
    run = write_run(tmp_path / "run", changes=changes)
    for cells in ((), ("restart",)):
        with pytest.raises(UsageError, match=message):
            accept(run, shelf, cells, TERMS)
    assert shelf.keys() == ()


def test_an_unknown_cell_or_an_empty_reason_is_refused(tmp_path, shelf):
    run = write_run(tmp_path / "run")
    with pytest.raises(UsageError, match="did you mean 'restart'"):
        accept(run, shelf, ("restrat",), TERMS)
    with pytest.raises(UsageError, match="expected why these captures are accepted"):
        accept(run, shelf, (), dataclasses.replace(TERMS, reason=" "))


def test_what_is_accepted_is_in_force_and_names_no_host(tmp_path, shelf):
    accept(write_run(tmp_path / "run"), shelf, (), TERMS)
    found = shelf.newest(KEY)
    assert (found.author, found.reason, found.accepted) == ("alice", "first", "2026-03-01T00:00:00Z")
    assert (found.requests, found.positions, found.rule, found.verdict) == (2, 5, "topk", "PASS")
    assert (found.floor, found.control) == ("the reference twice: 288 positions same", "96 of 96 positions differ")
    assert shelf.fingerprint(found).field("package.torch").value == "2.13.0"
    for path in (tmp_path / "baselines").rglob("*"):
        assert path.is_dir() or b"alices-laptop" not in path.read_bytes()


def test_equal_captures_are_stored_once_and_entries_chain_back(tmp_path, shelf):
    accept(write_run(tmp_path / "one"), shelf, (), TERMS)
    accept(write_run(tmp_path / "two", torch="2.14.0"), shelf, (), dataclasses.replace(TERMS, reason="second"))
    past = shelf.past(KEY)
    assert [entry.reason for entry in past] == ["second", "first"]
    assert past[0].table == past[1].table
    assert len(list((tmp_path / "baselines").rglob("*.parquet"))) == 1
    assert shelf.keys() == (KEY,)


def test_a_capture_that_is_not_the_records_is_refused(tmp_path, shelf):
    run = write_run(tmp_path / "run", changes={"digests": {"reference": DIGEST["a"]}})
    with pytest.raises(UsageError, match="they are not of one run; run again"):
        accept(run, shelf, (), TERMS)
    with pytest.raises(StoreError, match="they are not of one run; run again"):
        hold(run, shelf)


def moved(position=1):
    made = traces()
    made.positions.logprob.view(np.uint32)[position] ^= 1
    return made


def test_the_same_bits_pass_whatever_changed_and_say_so(tmp_path, shelf):
    accept(write_run(tmp_path / "one"), shelf, (), TERMS)
    same = hold(write_run(tmp_path / "two"), shelf)[LABEL]
    assert (same.outcome, same.sentence, same.environment) == ("same", "unchanged environment, same bits", "unchanged")
    changed = hold(write_run(tmp_path / "three", torch="2.14.0"), shelf)[LABEL]
    assert (changed.outcome, changed.suspects) == ("same", ("package.torch: 2.13.0 -> 2.14.0",))
    assert changed.sentence.startswith("changed environment, same bits")


def test_one_ulp_is_a_drift_located_without_stored_logprobs_and_the_suspects_are_named(tmp_path, shelf):
    accept(write_run(tmp_path / "one"), shelf, (), dataclasses.replace(TERMS, keep=()))
    drift = hold(write_run(tmp_path / "two", moved(position=4), torch="2.14.0"), shelf)[LABEL]
    assert (drift.outcome, drift.first, drift.differing_requests) == ("different", ("r1", 1), 1)
    assert drift.sentence.endswith("changed: package.torch: 2.13.0 -> 2.14.0")
    assert "no logprobs were kept with the baseline" in drift.size


def test_with_logprobs_kept_a_drift_has_a_size(tmp_path, shelf):
    accept(write_run(tmp_path / "one"), shelf, (), TERMS)
    drift = hold(write_run(tmp_path / "two", moved()), shelf)[LABEL]
    assert drift.size.startswith("1 of 5 compared positions differ under rule logprobs, at most 1 ulp")
    assert drift.sentence.endswith(NO_SUSPECT)


def test_evidence_beyond_the_rule_is_no_drift(tmp_path, shelf):
    rule = {"rule": "tokens"}
    accept(write_run(tmp_path / "one", changes=rule), shelf, (), TERMS)
    made = moved()
    digest = judged_digest(made)
    same = hold(write_run(tmp_path / "two", made, changes=rule | {"digests": {"reference": digest}}), shelf)[LABEL]
    assert (same.outcome, "evidence beyond it differs" in same.sentence) == ("same", True)


def test_traces_are_opened_only_where_digests_differ(tmp_path, shelf, monkeypatch):
    accept(write_run(tmp_path / "one"), shelf, (), TERMS)
    run = write_run(tmp_path / "two")
    for file in tmp_path.rglob("*.parquet"):
        file.unlink()
    assert hold(run, shelf)[LABEL].outcome == "same"


def test_another_corpus_is_not_comparable(tmp_path, shelf):
    accept(write_run(tmp_path / "one"), shelf, (), TERMS)
    drift = hold(write_run(tmp_path / "two", corpus="other"), shelf)[LABEL]
    assert (drift.outcome, drift.sentence) == (
        "incomparable",
        "the baseline was made with another corpus; accept a new one",
    )


def test_another_set_of_requests_is_a_drift(tmp_path, shelf):
    accept(write_run(tmp_path / "one"), shelf, (), TERMS)
    drift = hold(write_run(tmp_path / "two", traces((3, 2, 1))), shelf)[LABEL]
    assert (drift.outcome, drift.sentence) == ("different", "another set of requests was answered")


def test_damage_to_a_baseline_is_one_clear_error(tmp_path, shelf):
    accept(write_run(tmp_path / "one"), shelf, (), TERMS)
    (head,) = (tmp_path / "baselines" / "heads").rglob("*.json")
    intact = head.read_text()
    for text, message in (
        ("{", "expected JSON"),
        ('{"schema": 2}', "newer than 1"),
        ('{"schema": 1, "entry": "00"}', "is missing"),
    ):
        head.write_text(text)
        with pytest.raises(StoreError, match=message):
            shelf.newest(KEY)
    head.write_text(intact)
    other = dataclasses.replace(KEY, variant="new-same")
    (head.parent / "new-same.json").write_text(intact)
    with pytest.raises(StoreError, match="found one of restart"):
        shelf.newest(other)
    with pytest.raises(StoreError, match="is no whole baseline"):
        read_baseline(b'{"schema": 1, "key": {}}', "x")
    (table,) = tmp_path.rglob("baselines/objects/*/*.parquet")
    table.write_bytes(table.read_bytes()[:-1] + b"\0")
    with pytest.raises(StoreError, match="the file was changed; restore it"):
        hold(write_run(tmp_path / "two", moved()), shelf)


def test_the_commands_accept_and_show(tmp_path):
    write_run(tmp_path / "run")
    url = tmp_path / "kept"
    empty = samebits("baseline", "show", "--baselines", url)
    assert (empty.code, "no baseline yet" in empty.out) == (0, True)
    done = samebits(
        "baseline", "accept", tmp_path / "run", "--reason", "first", "--author", "alice", "--baselines", url
    )
    assert (done.code, f"accepted {LABEL} on fake with fake: 5 positions" in done.out) == (0, True)
    shown = samebits("baseline", "show", "restart", "--baselines", url)
    assert "accepted " in shown.out
    assert "by alice: first" in shown.out
    assert samebits("baseline", "show", "nothing", "--baselines", url).code == 2
