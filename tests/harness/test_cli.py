"""The command line: exit codes, one clear error per mistake, nothing written before the plan stands."""

import dataclasses
import json
import os
import shutil
import subprocess
import sys

import pytest

from harness.faults.captures import plant_least
from harness.store import Store

CELL = """schema = 1
name = "seeded"
invariant = "A seed gives the same tokens in any company."
corpus = "smoke"
rule = "topk"
replay = "natural"
axis = { name = "batch", reference = "alone", variants = ["together"] }
control = { variant = { seed_offset = 1 } }
"""


def samebits(*arguments, cwd=None):
    command = [sys.executable, "-m", "harness.cli", *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    folder = tmp_path_factory.mktemp("work")
    (folder / "cell.toml").write_text(CELL)
    return folder


@pytest.fixture(scope="module")
def finished(workplace):
    result = samebits("run", "cell.toml", "--engine", "fake", "--out", "a", cwd=workplace)
    assert result.returncode == 0, result.stdout + result.stderr
    return result


def test_a_run_prints_the_table_and_the_report(finished, workplace):
    assert "PASS" in finished.stdout
    assert "seeded[alone-together]" in finished.stdout
    assert "report: a/report.html" in finished.stdout
    assert "weak corpus" in finished.stdout
    assert "matrix cell.toml, engine fake" in finished.stderr
    names = sorted(entry.name for entry in (workplace / "a").iterdir())
    assert names == ["captures", "junit.xml", "logs", "plan.json", "report.html", "run.json", "summary.md"]
    seconds = json.loads((workplace / "a" / "run.json").read_text())["seconds"]
    assert seconds["total"] >= seconds["workers"] > 0
    assert seconds["outside"] == pytest.approx(seconds["total"] - seconds["workers"], abs=0.002)


def test_two_runs_compare_equal_and_another_seed_does_not(finished, workplace):
    assert samebits("run", "cell.toml", "--engine", "fake", "--out", "b", "--quiet", cwd=workplace).returncode == 0
    result = samebits("compare", "a", "b", cwd=workplace)
    assert result.returncode == 0, result.stdout
    assert "cases compared" in result.stdout
    store = Store(workplace / "b" / "captures")
    first, second, *_ = store.cases()
    capture = store.read(first)
    store.write(dataclasses.replace(capture, traces=plant_least(capture.traces, "topk", "natural")))
    result = samebits("compare", "a", "b", cwd=workplace)
    assert result.returncode == 1, result.stdout
    assert "1 of 128 positions differ" in result.stdout
    for file in store.folder.joinpath(second).iterdir():
        (store.folder / first / file.name).write_bytes(file.read_bytes())
    result = samebits("compare", "a", "b", cwd=workplace)
    assert result.returncode == 2
    assert "it is another case's capture" in result.stderr


def test_two_runs_that_lack_the_same_capture_are_not_the_same(finished, workplace):
    for name in ("left", "right"):
        shutil.copytree(workplace / "a", workplace / name)
        shutil.rmtree(min((workplace / name / "captures").iterdir()))
    result = samebits("compare", "left", "right", cwd=workplace)
    assert result.returncode == 1, result.stdout
    assert "left: 3 of 4 planned cases were captured" in result.stdout


def test_output_that_nobody_reads_is_not_status_0(workplace):
    """`samebits run … | head -1` must not turn a verdict into success."""
    code = "import sys; from harness.cli import main; sys.argv = ['samebits', 'cells', 'list']; main()"
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run([sys.executable, "-c", code], stdout=writer, stderr=subprocess.PIPE, text=True, timeout=60)
    os.close(writer)
    assert (done.returncode, done.stderr) == (1, "")


def test_a_record_that_was_edited_is_no_record(finished, workplace):
    shutil.copytree(workplace / "a", workplace / "edited")
    file = workplace / "edited" / "run.json"
    file.write_text(file.read_text().replace('"foreseen": false', '"foreseen": true'))
    for command in ("report", "gate"):
        result = samebits(command, "edited", cwd=workplace)
        assert result.returncode == 2, result.stdout
        assert "edited or damaged; restore it, or run again" in result.stderr


def test_a_report_can_be_written_again(finished, workplace):
    (workplace / "a" / "report.html").unlink()
    assert samebits("report", "a", cwd=workplace).returncode == 0
    assert (workplace / "a" / "report.html").stat().st_size > 1000


def test_a_failing_cell_is_exit_1(workplace):
    result = samebits("run", "cell.toml", "--engine", "fake", "--set", "invariant=false", "--quiet", "--out", "f",
                      cwd=workplace)  # fmt: skip
    assert result.returncode == 1
    assert "FAIL" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("run", "quik"), "did you mean 'quick'"),
        (("run",), "Missing argument"),
        (("run", "quick", "--engine", "fake", "--modle", "x"), "No such option"),
        (("run", "quick", "--engine", "fak"), "did you mean 'fake'"),
        (("run", "quick", "--engine", "fake", "--model", "smol"), "smol"),
        (("run", "quick", "--engine", "fake", "--set", "threads=two"), "expected int, got 'two'"),
        (("run", "quick", "--engine", "fake", "--cell", "alone"), "has no such cell"),
        (("run", "quick", "--model", "/no/such/model"), "/no/such/model"),
        (("plan", "nothing.toml"), "no such path or shipped matrix"),
        (("cells", "check", "bad.toml"), "$.rule: 'topq'"),
        (("report", "nowhere"), "nowhere/run.json"),
        (("compare", "nowhere", "nowhere"), "no such folder; name the folders of two runs"),
        (("fingerprint", "diff", "x.json", "y.json"), "x.json"),
    ],
)
def test_a_mistake_is_one_message_and_exit_2(tmp_path, arguments, words):
    (tmp_path / "bad.toml").write_text(CELL.replace("topk", "topq"))
    result = samebits(*arguments, cwd=tmp_path)
    assert result.returncode == 2, result.stdout + result.stderr
    assert words in result.stderr
    assert "Traceback" not in result.stderr
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["bad.toml"], "something was written"


def corpus_with(folder, change):
    """A copy of the smoke corpus with one request changed, digests left as they were or removed."""
    from harness.corpus import SHIPPED

    target = folder / "mine"
    target.mkdir()
    for name in ("manifest.json", "requests.jsonl"):
        (target / name).write_bytes((SHIPPED / "smoke" / name).read_bytes())
    lines = (target / "requests.jsonl").read_text().splitlines()
    request = json.loads(lines[0])
    change(request)
    (target / "requests.jsonl").write_text("\n".join([json.dumps(request), *lines[1:]]) + "\n")
    (folder / "cell.toml").write_text(CELL.replace('"smoke"', f'"{target}"'))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda r: r["sampling"].update(temperature=float("nan")), "temperature"),
        (lambda r: r.update(prompt_token_ids=[99_999_999]), "prompt_token_ids"),
        (lambda r: r.update(prompt_token_ids=[]), "prompt_token_ids"),
        (lambda r: r["sampling"].update(top_k="8"), '"8" (str)'),
        (lambda r: r.update(extra=1), "extra"),
    ],
)
def test_a_bad_corpus_is_refused_before_anything_is_written(tmp_path, change, words):
    corpus_with(tmp_path, change)
    result = samebits("run", "cell.toml", "--engine", "fake", "--out", "out", cwd=tmp_path)
    assert result.returncode == 2, result.stdout + result.stderr
    assert words in result.stderr
    assert not (tmp_path / "out").exists()


def test_plan_starts_nothing_and_writes_nothing(tmp_path):
    result = samebits("plan", "quick", "--engine", "fake", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "9 cells, 9 pairs" in result.stdout
    assert "max-num-seqs[1-8]" in result.stdout
    assert list(tmp_path.iterdir()) == []


def test_models_cells_and_fingerprint_answer():
    assert "smollm2" in samebits("models").stdout
    listed = samebits("cells", "list").stdout
    assert "What a request gets does not depend on whether others run beside it." in listed
    assert samebits("cells", "check", "quick", "build", "ragged").returncode == 0
    assert "cpu" in samebits("fingerprint").stdout


def test_selftest_kills_every_fault():
    result = samebits("selftest")
    assert result.returncode == 0, result.stdout + result.stderr
    killed, _, total = result.stdout.split("\n")[-2].partition(" killed")[0].split()
    assert killed == total
    assert int(total) >= 30


def test_a_read_only_folder_is_one_error(tmp_path):
    (tmp_path / "cell.toml").write_text(CELL)
    result = samebits("run", "cell.toml", "--engine", "fake", "--out", "/proc/nothing", cwd=tmp_path)
    assert result.returncode == 2
    assert "--out /proc/nothing: cannot be made" in result.stderr
