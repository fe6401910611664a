"""A model judge: its file, its questions, and the mark on every score that its own cells do not back."""

import json
import shutil
import string

import pytest
from click.testing import CliRunner

from harness.cli import commands
from harness.corpus import load_corpus
from harness.errors import UsageError
from harness.evaluation.judge_spec import read_judge
from harness.evaluation.judges import Output
from harness.evaluation.key import Item
from harness.evaluation.model_judge import Question, expected_text, prompt_of, read_answer

MARK = "judge not shown reproducible"
LETTERS = list(string.ascii_letters)
SPEC = """schema = 1
name = "grader"
engine = "fake"
template = "Q: {{question}} E: {{expected}} O: {{output}}"
{more}
[settings]
{settings}
[parse]
{parse}
"""
BY_CHOICE = f"choices = {json.dumps(LETTERS)}\npoints = {json.dumps(LETTERS[26:])}"
BY_PATTERN = "pattern = '(?s)([a-m])|.'\npoints = ['a', 'b', 'c', 'd']"
CELL = """schema = 1
name = "asked-together"
invariant = "i"
corpus = "{corpus}"
rule = "{rule}"
replay = "natural"
[axis]
name = "batch"
reference = "alone"
variants = ["together"]
[control]
mode = "free"
"""


def spec(tmp_path, parse=BY_CHOICE, settings="", more="", name="judge.toml"):
    file = tmp_path / name
    file.write_text(SPEC.format(parse=parse, settings=settings, more=more))
    return file


def invoke(*options):
    return CliRunner().invoke(commands, list(map(str, options)), standalone_mode=False)


def run(folder, *options, corpus="smoke", rule="topk", engine="fake"):
    folder.parent.mkdir(exist_ok=True)
    cell = folder.parent / f"{folder.name}.toml"
    cell.write_text(CELL.format(corpus=corpus, rule=rule))
    invoke("run", cell, "--engine", engine, "--out", folder, "--quiet", *options)
    assert (folder / "run.json").is_file()
    return folder


@pytest.fixture(scope="module")
def scored(tmp_path_factory):
    """A run with answers to judge, and the judge's own cells, which PASS."""
    base = tmp_path_factory.mktemp("judged")
    return run(base / "run", corpus="eval"), run(base / "own")


def judged(scored, file, *options):
    result = invoke("eval", scored[0], "--judge", file, "--quiet", *options)
    assert result.exception is None, result.exception
    record = json.loads((scored[0] / "eval.json").read_text())
    pages = [result.output, (scored[0] / "eval.md").read_text(), (scored[0] / "eval.html").read_text()]
    return record, pages


def test_a_judge_whose_own_cells_pass_scores_without_a_mark(scored, tmp_path):
    record, pages = judged(scored, spec(tmp_path), "--judge-run", scored[1])
    judge = record["judge"]
    assert (judge["shown"], judge["reasons"], judge["differed"]) == (True, [], 0)
    assert judge["temperature"] == 0.0
    assert any("weak corpus" in cap for cap in judge["caps"])
    assert judge["fingerprint"]["digest"].startswith("sha256:")
    pair, control = [one for one in record["scores"] if one["judged_by"] == "grader"]
    assert (pair["arms"], control["arms"], pair["total"], pair["mark"]) == ("pair", "control", 16, "")
    assert 0 < pair["reference"] < 16, "a judge that always says the same shows nothing"
    assert pair["moved"] == []
    assert control["moved"]
    assert all(MARK not in page for page in pages)
    assert all("own cells all PASS" in page for page in pages)


def marked(record, pages, reason):
    assert not record["judge"]["shown"]
    assert reason in record["judge"]["mark"]
    assert all(one["mark"] == record["judge"]["mark"] for one in record["scores"] if one["judged_by"] == "grader")
    assert all(one["mark"] == "" for one in record["scores"] if one["judged_by"] == "rules")
    text, table, page = pages
    scores = [one for one in record["scores"] if one["judged_by"] == "grader"]
    assert sum(line.startswith("by judge grader") and MARK in line for line in text.splitlines()) == len(scores)
    assert sum(line.startswith("|") and f"grader ({MARK})" in line for line in table.splitlines()) == len(scores)
    assert page.count(f'<small class="warn">{MARK}') == len(scores)
    assert f"<b>{MARK.capitalize()}</b>" in page
    for page in pages:
        assert reason.replace("`", "'") in page.replace("&#39;", "'").replace("`", "'")


def test_without_a_run_of_its_own_the_score_is_marked(scored, tmp_path):
    record, pages = judged(scored, spec(tmp_path, settings="threads = 2"))
    marked(record, pages, "its own cells were not run (`samebits run eval --engine fake --model fake --set threads=2")


def test_a_run_of_another_fingerprint_does_not_count(scored, tmp_path):
    record, pages = judged(scored, spec(tmp_path, settings="threads = 2"), "--judge-run", scored[1])
    marked(record, pages, "another fingerprint than in its own run: ")
    assert "threads: 1 -> 2" in record["judge"]["mark"]


def test_a_run_that_failed_does_not_count(scored, tmp_path):
    own = run(tmp_path / "own", "--set", "invariant=false")
    record, pages = judged(scored, spec(tmp_path, settings="invariant = false"), "--judge-run", own)
    marked(record, pages, "its own cells did not all PASS: asked-together[alone-together] FAIL")
    assert "another fingerprint" not in record["judge"]["mark"]


def test_a_pass_in_tokens_does_not_cover_a_reading_of_logprobs(scored, tmp_path):
    own = run(tmp_path / "own", rule="tokens")
    record, pages = judged(scored, spec(tmp_path), "--judge-run", own)
    marked(record, pages, "judged under rule tokens, its answers are read from topk")
    record, _ = judged(scored, spec(tmp_path, parse=BY_PATTERN), "--judge-run", own)
    assert record["judge"]["shown"]


def test_a_judge_that_contradicts_itself_is_marked(scored, tmp_path):
    file = spec(tmp_path, settings='fault = "noise"\nfault_position = 0\nfault_request = "question-0000"')
    record, pages = judged(scored, file, "--judge-run", scored[1])
    assert record["judge"]["differed"] > 0
    marked(record, pages, "of its own answers otherwise when asked again")


def test_a_run_without_captures_does_not_count(scored, tmp_path):
    own = shutil.copytree(scored[1], tmp_path / "own")
    for file in (own / "captures").rglob("capture.json"):
        file.unlink()
    record, pages = judged(scored, spec(tmp_path), "--judge-run", own)
    marked(record, pages, "its captures are gone")


def test_rules_and_a_judge_never_share_a_score(scored, tmp_path):
    rules = [one for one in judged(scored, spec(tmp_path))[0]["scores"] if one["judged_by"] == "rules"]
    assert invoke("eval", scored[0]).return_value == 0
    alone = json.loads((scored[0] / "eval.json").read_text())
    assert alone["judge"] is None
    assert alone["scores"] == rules


def test_items_for_a_model_judge_wait_for_one(scored, tmp_path):
    key = json.loads((load_corpus("eval").path / "answers.json").read_text())
    key["items"] = [{"request": one["request"], "judge": "model", "answers": ["x"]} if at < 3 else one
                    for at, one in enumerate(key["items"])]  # fmt: skip
    answers = tmp_path / "answers.json"
    answers.write_text(json.dumps(key))
    assert invoke("eval", scored[0], "--answers", answers).return_value == 0
    record = json.loads((scored[0] / "eval.json").read_text())
    assert record["scores"][0]["total"] == 13
    assert "3 items are for a model judge; name one with --judge" in record["unscored"][0]
    record, _ = judged(scored, spec(tmp_path), "--answers", answers)
    assert [one["total"] for one in record["scores"] if one["arms"] == "pair"] == [13, 16]
    assert record["unscored"] == []


def test_what_an_answer_says_is_never_a_placeholder(tmp_path):
    judge = read_judge(spec(tmp_path))
    asked = Question(item=Item(request="r", judge="exact", answers=(" A", "B ")), question="q", output="{expected} ")
    assert prompt_of(judge, asked) == "Q: q E: A or B O: {expected}"
    assert expected_text(Item(request="r", judge="regex", pattern="x+")) == "text that matches x+"
    assert "JSON" in expected_text(Item(request="r", judge="json_schema", schema={"type": "object"}))


def test_an_output_that_cannot_be_read_earns_nothing_and_says_so(tmp_path):
    by_pattern = read_judge(spec(tmp_path, parse="pattern = '(?i)verdict: (yes|no)'\npoints = ['yes']"))
    text = lambda said: Output(text=said, first={}, encode=lambda one: tuple(one.encode()))  # noqa: E731
    assert read_answer(by_pattern, text("so: Verdict: yes")).points == 1
    assert read_answer(by_pattern, text("Verdict: no")).points == 0
    unread = read_answer(by_pattern, text("perhaps"))
    assert (unread.points, unread.saw) == (0, "not read: no match in 'perhaps'")
    by_choice = read_judge(spec(tmp_path))
    assert read_answer(by_choice, text("a")).saw == "not read: no choice is among the reported candidates"


@pytest.mark.parametrize(("changes", "message"), [
    ({"more": "temperature = 1.0"}, "$.temperature: unknown key"),
    ({"settings": "thread = 2"}, "has no setting 'thread'"),
    ({"more": 'mode = "deterministc"'}, "did you mean 'deterministic'"),
    ({"parse": "points = ['a']"}, "expected either choices or pattern"),
    ({"parse": BY_CHOICE + "\npattern = 'x'"}, "expected either choices or pattern"),
    ({"parse": "pattern = '('\npoints = ['a']"}, "no regular expression"),
    ({"parse": "choices = ['a', 'b']\npoints = ['c']"}, "'c' is not one of the choices"),
    ({"parse": "choices = ['a', 'b']"}, "at least one reading that earns"),
    ({"parse": "choices = ['a']\npoints = ['a']"}, "at least two different texts"),
    ({"more": "max_tokens = 0"}, "$.max_tokens: expected an integer of at least 1"),
])  # fmt: skip
def test_a_judge_file_with_a_mistake_is_refused(tmp_path, changes, message):
    with pytest.raises(UsageError) as error:
        read_judge(spec(tmp_path, **changes))
    assert message in str(error.value)


@pytest.mark.parametrize(("old", "new", "message"), [
    ("{output}", "", "{output} is missing"), ("{question}", "{asked}", "unknown placeholder {asked}"),
    ("schema = 1", "schema = 2", "$.schema"), ('"fake"', '"fakes"', "did you mean 'fake'"),
])  # fmt: skip
def test_a_template_engine_or_schema_that_cannot_be_used_is_refused(tmp_path, old, new, message):
    file = spec(tmp_path)
    file.write_text(file.read_text().replace(old, new))
    with pytest.raises(UsageError) as error:
        read_judge(file)
    assert message in str(error.value)


def test_a_judge_run_needs_a_judge(scored):
    result = invoke("eval", scored[0], "--judge-run", scored[1])
    assert "--judge-run without --judge" in str(result.exception)


def test_the_bundled_engine_judges_and_its_own_cells_back_it(scored, tmp_path):
    own = run(tmp_path / "own", "--model", "tiny", "--set", "threads=1", engine="bundled")
    file = spec(tmp_path, parse="pattern = '(?s)(.)'\npoints = ['a', 'b', 'c', 'd', 'e']", settings="threads = 1",
                more='model = "tiny"\nmax_tokens = 2')  # fmt: skip
    file.write_text(file.read_text().replace('"fake"', '"bundled"'))
    record, _ = judged(scored, file, "--judge-run", own)
    assert record["judge"]["shown"], record["judge"]["reasons"]
    assert record["judge"]["fingerprint"]["fields"]
