"""`samebits fingerprint` and `samebits fingerprint diff`."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from harness.engine import Field
from harness.errors import OutputError, StoreError, UsageError
from harness.fingerprint import Fingerprint, fingerprint_of
from harness.fingerprint.cli import build_command, load_fingerprint, save_fingerprint


def run(*arguments, subject=None):
    return CliRunner().invoke(build_command(subject), [str(item) for item in arguments])


def make(name, value, field_class="identity"):
    return Field(name=name, value=value, field_class=field_class, source="test")


def saved(path, *fields):
    save_fingerprint(fingerprint_of(fields), path)
    return path


def test_prints_classes_and_digest():
    done = run()
    assert done.exit_code == 0
    lines = done.output.splitlines()
    assert lines[0].startswith("identity: ")
    assert any(line.startswith("  cpu.isa.level ") for line in lines)
    assert lines[-1].startswith("identity digest sha256:")


def test_json_is_what_diff_reads(tmp_path):
    a, b = tmp_path / "a.json", tmp_path / "b.json"
    a.write_text(run("--json").output)
    assert run("--out", b).output.endswith(f"  {b}\n")
    assert Fingerprint.from_json(json.loads(a.read_text())).digest == load_fingerprint(b).digest
    done = run("diff", a, b)
    assert done.exit_code == 0
    assert "no identity or lineage field differs" in done.output


def test_an_engine_adds_its_fields():
    asked = []

    def subject(engine, model):
        asked.append((engine, model))
        return (make("engine.weights", "sha256:1"),)

    done = run("--engine", "bundled", "--model", "tiny", subject=subject)
    assert asked == [("bundled", "tiny")]
    assert "  engine.weights " in done.output


def test_what_the_engines_process_says_of_its_host_wins():
    def subject(engine, model):
        return (make("env.OMP_NUM_THREADS", "3"), make("os.libc", "glibc 0.1"))

    lines = run("--engine", "bundled", "--model", "tiny", subject=subject).output.splitlines()
    assert [line.split() for line in lines if "env.OMP_NUM" in line] == [["env.OMP_NUM_THREADS", "3"]]
    assert sum("os.libc " in line for line in lines) == 1
    assert any(line.startswith("  cpu.isa.level ") for line in lines)


@pytest.mark.parametrize("arguments", [("--engine", "bundled"), ("--model", "tiny")])
def test_engine_and_model_go_together(arguments):
    assert isinstance(run(*arguments).exception, UsageError)


def test_differences_give_exit_code_1_worst_first(tmp_path):
    a = saved(tmp_path / "a", make("b", "1", "lineage"), make("z", "1"), make("c", "1", "context"))
    b = saved(tmp_path / "b", make("b", "2", "lineage"), make("z", "2"), make("c", "2", "context"))
    done = run("diff", a, b)
    assert done.exit_code == 1
    assert done.output.splitlines() == [
        "identity  z: 1 -> 2",
        "lineage   b: 1 -> 2",
        "context   c: 1 -> 2",
        "2 fields differ (1 of context, never compared)",
    ]


def test_context_alone_is_no_difference(tmp_path):
    a, b = saved(tmp_path / "a", make("c", "1", "context")), saved(tmp_path / "b", make("c", "2", "context"))
    assert run("diff", a, b).exit_code == 0


@pytest.mark.parametrize("text", ["", "{", "[]", '{"schema": 9}', "\udcff"])
def test_a_file_that_is_no_fingerprint_is_an_error_with_its_path(tmp_path, text):
    bad = tmp_path / "bad.json"
    bad.write_bytes(text.encode("utf-8", "surrogateescape"))
    done = run("diff", bad, saved(tmp_path / "a", make("x", "1")))
    assert isinstance(done.exception, StoreError)
    assert done.exception.exit_code == 2
    assert str(done.exception).startswith(str(bad))


def test_a_missing_file_and_an_unwritable_place(tmp_path):
    assert "No such file" in str(run("diff", tmp_path / "no", tmp_path / "no").exception)
    done = run("--out", tmp_path / "no" / "file.json")
    assert isinstance(done.exception, OutputError)
