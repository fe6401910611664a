"""Whole runs on the fake engine: every way an engine can misbehave gets its verdict, and nothing else suffers."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from harness import registry
from harness.choose import choose_plan
from harness.errors import OutputError, UsageError
from harness.progress import Quiet
from harness.run import RunRequest, alone_in, prepare_folder, run
from harness.seal import sealed

# Two cells that share one engine process each way, so that a whole run costs three process starts at most.
BATCH = """
[[cells]]
name = "batch"
invariant = "Company does not matter."
corpus = "smoke"
rule = "topk"
replay = "golden"
axis = { name = "batch", reference = "alone", variants = ["together"] }
control = { mode = "free" }
"""
SEEDED = """
[[cells]]
name = "seeded"
invariant = "A seed gives the same tokens in any company."
corpus = "smoke"
rule = "topk"
replay = "natural"
axis = { name = "batch", reference = "alone", variants = ["together"] }
control = { variant = { seed_offset = 1 } }
"""
RESTART = """
[[cells]]
name = "restart"
invariant = "A new process gives the same."
corpus = "smoke"
rule = "topk"
replay = "golden"
axis = { name = "restart", reference = "same", variants = ["new"] }
control = { mode = "free", variant = { tuning = 1 } }
settings = { fault = "FAULT" }
"""
CELLS = ("batch", "seeded")


@pytest.fixture(autouse=True, scope="module")
def matrix_file(tmp_path_factory):
    file = tmp_path_factory.mktemp("matrix") / "small.toml"
    file.write_text("schema = 1\n" + BATCH + SEEDED)
    MATRIX.append(str(file))
    yield
    MATRIX.clear()


MATRIX = []


def fake_run(folder, *assignments, cells=(), deadline=60.0, matrix=None, overwrite=False):
    chosen = matrix or MATRIX[0]
    plan = choose_plan([chosen], engine="fake", model=None, mode=None, assignments=assignments, cells=cells)
    request = RunRequest(plan=plan, adapter=registry.adapter("fake"), folder=folder, progress=Quiet(),
                         deadline_s=deadline, overwrite=overwrite, begun=time.monotonic())  # fmt: skip
    return run(request, lambda record, place: None)


def verdicts(record):
    return {entry["cell"]: entry["verdict"] for entry in record["verdicts"]}


def reasons(record):
    return {entry["cell"]: entry["reason"] for entry in record["verdicts"]}


def test_an_honest_engine_passes_and_the_record_says_what_it_is_worth(tmp_path):
    record = fake_run(tmp_path / "run")
    assert verdicts(record) == dict.fromkeys(CELLS, "PASS"), reasons(record)
    assert record["exit_code"] == 0
    entry = record["verdicts"][0]
    assert entry["comparison"]["positions"] == 8 * 16
    assert entry["comparison"]["witnessed"] > 100
    assert entry["control"]["fired"] is True
    assert entry["floor"]["verdict"] == "same"
    assert record["plan"]["judged"] == record["plan"]["pairs"] == 2
    assert json.loads((tmp_path / "run" / "run.json").read_text()) == record


def test_an_engine_that_depends_on_its_batch_fails_with_place_and_layer(tmp_path):
    record = fake_run(tmp_path / "run", "invariant=false")
    assert verdicts(record) == dict.fromkeys(CELLS, "FAIL")
    assert record["exit_code"] == 1
    diagnosis = record["verdicts"][0]["diagnosis"]
    assert diagnosis["layer"] == "forward"
    assert diagnosis["first"]["position"] >= 0
    assert len(diagnosis["text"].splitlines()) == 5


def test_run_to_run_noise_blames_no_axis(tmp_path):
    record = fake_run(tmp_path / "run", "fault=noise", cells=("seeded",))
    assert verdicts(record) == {"seeded": "FAIL"}
    assert "run-to-run" in reasons(record)["seeded"]


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("lie-batch", "contradicts itself"),
        ("lie-steps", "contradicts itself"),
        ("nan", "contradicts itself"),
        ("topk-order", "contradicts itself"),
        ("raise", "reference"),
        ("crash", "ended with status 70"),
        ("die", "dies on purpose"),
        ("drop", "has no answer"),
        ("truncate", "max_tokens is 16"),
    ],
)
def test_what_an_engine_does_wrong_in_every_arm_is_an_error(tmp_path, fault, words):
    """Both arms share the fault, so a comparison of the arms alone would be equal."""
    record = fake_run(tmp_path / "run", f"fault={fault}", cells=("seeded",))
    assert verdicts(record) == {"seeded": "ERROR"}, reasons(record)
    assert words in reasons(record)["seeded"]
    assert record["exit_code"] == 4
    if fault == "crash":
        assert "log_tail" in record["verdicts"][0]["error"]


@pytest.mark.parametrize("fault", ["crash", "die"])
def test_one_cell_crashes_and_the_others_go_on(tmp_path, fault):
    file = tmp_path / "m.toml"
    file.write_text("schema = 1\n" + RESTART.replace("FAULT", fault) + SEEDED)
    record = fake_run(tmp_path / "run", matrix=str(file))
    assert verdicts(record) == {"restart": "ERROR", "seeded": "PASS"}, reasons(record)
    assert record["exit_code"] == 4


@pytest.mark.parametrize(("settings", "expect", "verdict", "why"), [
    ('fault = "crash", fault_when = "batched"', "ERROR", "ERROR", "as declared: variant: the engine process"),
    ('fault = "crash"', "ERROR", "INSUFFICIENT", "the reference errs already"),
    ('fault = "nan", fault_when = "batched"', "ERROR", "INSUFFICIENT", "every capture was made"),
    ('fault = "none"', "ERROR", "INSUFFICIENT", "it came to PASS"),
    ("invariant = false", "FAIL", "FAIL", "as declared"),
    ('fault = "noise"', "FAIL", "INSUFFICIENT", "the reference differs from itself"),
    ('fault = "noise"', "RUN-TO-RUN", "FAIL", "as declared: run-to-run"),
    ("invariant = false", "RUN-TO-RUN", "INSUFFICIENT", "the reference is the same twice"),
])  # fmt: skip
def test_a_cell_shows_its_point_only_where_the_axis_can_have_caused_it(tmp_path, settings, expect, verdict, why):
    file = tmp_path / "cell.toml"
    body = SEEDED.replace('replay = "natural"', f'replay = "natural"\nexpect = "{expect}"')
    file.write_text(f"schema = 1\n{body}settings = {{ {settings} }}\n")
    record = fake_run(tmp_path / "run", matrix=str(file))
    assert verdicts(record) == {"seeded": verdict}, reasons(record)
    assert why in reasons(record)["seeded"]
    assert record["exit_code"] == (3 if verdict == "INSUFFICIENT" else 0)


def test_a_hang_is_ended_at_its_deadline(tmp_path):
    record = fake_run(tmp_path / "run", "fault=hang", cells=("seeded",), deadline=3.0)
    assert verdicts(record) == {"seeded": "ERROR"}
    assert "no answer within 3 s" in reasons(record)["seeded"]


def test_a_restart_is_two_processes(tmp_path):
    file = tmp_path / "m.toml"
    file.write_text("schema = 1\n" + RESTART.replace("FAULT", "none"))
    record = fake_run(tmp_path / "run", matrix=str(file))
    assert verdicts(record) == {"restart": "PASS"}, reasons(record)
    nonces = {case["id"]: case["process_nonce"] for case in record["cases"]}
    cases = record["verdicts"][0]["cases"]
    assert nonces[cases["reference"]] == nonces[cases["floor"]] != nonces[cases["variant"]]


def test_a_finished_run_is_not_overwritten_silently(tmp_path):
    folder = tmp_path / "run"
    fake_run(folder, cells=("seeded",))
    with pytest.raises(UsageError, match="holds a finished run"):
        fake_run(folder, cells=("seeded",))
    (folder / "gate").mkdir()
    for name in ("gate.json", "gate/report.html", "release.tar", "mine.txt"):
        (folder / name).write_text("of the run before")
    record = fake_run(folder, cells=("batch",), overwrite=True)
    assert verdicts(record) == {"batch": "PASS"}
    left = {entry.name for entry in folder.iterdir()}
    assert "mine.txt" in left
    assert not left & {"gate", "gate.json", "release.tar"}


def test_two_runs_do_not_write_in_one_folder_at_once(tmp_path):
    with alone_in(tmp_path / "run"), pytest.raises(UsageError, match="another run is writing there now"):
        fake_run(tmp_path / "run", cells=("seeded",))
    assert verdicts(fake_run(tmp_path / "run", cells=("seeded",))) == {"seeded": "PASS"}


def test_a_folder_with_other_files_is_refused_and_left_alone(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(UsageError, match="found other files"):
        fake_run(tmp_path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["notes.txt"]


def test_a_folder_that_cannot_be_made_is_one_error(tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    plan = choose_plan([MATRIX[0]], engine="fake", model=None, mode=None, assignments=())
    with pytest.raises((OutputError, UsageError), match="--out"):
        prepare_folder(file / "run", plan, overwrite=False)


def samebits(*arguments, **options):
    return subprocess.Popen([sys.executable, "-m", "harness.cli", *arguments], stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE, text=True, **options)  # fmt: skip


def children_of(pid):
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if fields[1] == str(pid):
                found.append(int(entry.name))
    return found


def wait_for(condition, seconds=30.0):
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit, "waited in vain"
        time.sleep(0.02)


def test_ctrl_c_leaves_a_resumable_run_and_no_orphan(tmp_path):
    folder = tmp_path / "run"
    arguments = ("run", MATRIX[0], "--engine", "fake", "--set", "fault=slow", "--cell", "seeded", "--out", str(folder))
    # a shell without job control has SIGINT ignored in what it starts in the background, and that is inherited
    process = samebits(*arguments, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))
    captures = folder / "captures"
    wait_for(lambda: captures.is_dir() and any(captures.glob("[0-9a-f]*")))
    children = children_of(process.pid)
    assert children
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 130, errors
    assert f"--out {folder} resumes" in errors
    assert not any(Path(f"/proc/{child}").exists() for child in children)
    assert not (folder / "run.json").exists()
    process = samebits(*arguments)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    assert "resuming the interrupted run" in errors
    record = json.loads((folder / "run.json").read_text())
    assert verdicts(record) == {"seeded": "PASS"}


def test_a_killed_parent_takes_its_engine_along(tmp_path):
    process = samebits("run", MATRIX[0], "--engine", "fake", "--set", "fault=hang", "--out", str(tmp_path / "run"))
    wait_for(lambda: children_of(process.pid))
    child = children_of(process.pid)[0]
    process.kill()
    process.communicate(timeout=30)
    wait_for(lambda: not Path(f"/proc/{child}").exists(), seconds=10)


def test_a_resumed_run_captures_again_when_the_engine_changed(tmp_path):
    """Captures of another identity are not reused, though the plan is the same."""
    folder = tmp_path / "run"
    fake_run(folder, cells=("seeded",))
    (folder / "run.json").unlink()
    for header in sorted((folder / "captures").glob("*/capture.json")):
        text = header.read_text()
        stored = json.loads(text)
        for field in stored["capture"]["subject"]:
            if field["name"] == "samebits.source":
                field["value"] = "another source"
        header.write_text(json.dumps(sealed(stored)))
    record = fake_run(folder, cells=("seeded",))
    assert not any(case["reused"] for case in record["cases"])
    (folder / "run.json").unlink()
    record = fake_run(folder, cells=("seeded",))
    assert all(case["reused"] for case in record["cases"])
    assert verdicts(record) == {"seeded": "PASS"}


@pytest.mark.parametrize("name", ["positions.parquet", "capture.json"])
def test_a_damaged_capture_is_captured_again_on_resuming(tmp_path, name):
    folder = tmp_path / "run"
    fake_run(folder, cells=("seeded",))
    (folder / "run.json").unlink()
    file = min((folder / "captures").glob(f"*/{name}"))
    file.write_bytes(file.read_bytes()[:-3])
    record = fake_run(folder, cells=("seeded",))
    assert verdicts(record) == {"seeded": "PASS"}
    assert sum(not case["reused"] for case in record["cases"]) in (1, 2)
