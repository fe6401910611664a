"""Reports appear whole or not at all, and a place that cannot be written is one clear error."""

from __future__ import annotations

import errno
import os

import pytest
import run_samples

from harness.errors import OutputError, StoreError
from reports import make_reports
from reports.html import write_report

NAMES = ["junit.xml", "report.html", "summary.md"]


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_three_files_and_nothing_else(tmp_path):
    make_reports(run_samples.mixed(), tmp_path)
    assert names(tmp_path) == NAMES
    assert (tmp_path / "report.html").read_text(encoding="utf-8").startswith("<!DOCTYPE html>")
    before = [(tmp_path / name).read_bytes() for name in NAMES]
    make_reports(run_samples.mixed(), tmp_path)
    assert [(tmp_path / name).read_bytes() for name in NAMES] == before


def test_a_full_disk_leaves_the_old_file_and_no_rest(tmp_path, monkeypatch):
    (tmp_path / "report.html").write_text("old")

    def full(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OutputError, match=r"report\.html: cannot be written \(No space left on device\)") as caught:
        make_reports(run_samples.mixed(), tmp_path)
    assert caught.value.exit_code == 2
    assert names(tmp_path) == ["report.html"]
    assert (tmp_path / "report.html").read_text() == "old"


def test_a_place_that_is_no_folder(tmp_path):
    (tmp_path / "file").write_text("")
    for folder, reason in ((tmp_path / "none", "No such file"), (tmp_path / "file", "Not a directory")):
        with pytest.raises(OutputError, match=reason):
            write_report(run_samples.mixed(), folder / "report.html")


def test_another_schema_writes_nothing(tmp_path):
    with pytest.raises(StoreError):
        make_reports({"schema": 2}, tmp_path)
    assert names(tmp_path) == []
