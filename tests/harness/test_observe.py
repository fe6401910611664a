"""An engine is asked in its own process what it settled on; the doctor and the fingerprint rest on that."""

import pytest

from harness.errors import Unsupported, UsageError
from harness.observe import observe, subject_fields, worker_environment


def test_the_worker_answers_for_itself(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    seen = observe("bundled", "tiny", {"threads": 1})
    assert seen.requested["threads"] == 1
    assert seen.resolved["threads"] == 1
    assert worker_environment(seen)["OMP_NUM_THREADS"] == "1", "the adapter's value reached the worker, not ours"


def test_fields_carry_class_and_source():
    fields = {field.name: field for field in subject_fields("fake", "fake", {})}
    assert fields["config.invariant"].field_class == "identity"
    assert fields["lineage.served"].value == "nothing"


def test_an_engine_that_cannot_start_is_one_error(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("SAMEBITS_CACHE", str(tmp_path))
    with pytest.raises(Unsupported, match=r"g\+\+"):
        observe("bundled", "tiny", {"compiler": "g++"})


def test_an_unknown_setting_is_refused_before_anything_starts():
    with pytest.raises(UsageError, match="has no setting 'thread'"):
        observe("fake", "fake", {"thread": 1})
