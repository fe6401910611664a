"""Judges earn points by rule, keys are checked to the last item, and a moved answer is found item by item."""

import hashlib
import json

import pytest
from click.testing import CliRunner

from harness.cli import commands
from harness.corpus import load_corpus
from harness.errors import CorpusError
from harness.evaluation.judges import Output, judge
from harness.evaluation.key import Item, read_key
from harness.evaluation.score import ScoredArms, score_pair
from reports.evaluation import evaluation_table, render_evaluation, render_evaluation_page

CELL = """schema = 1
name = "asked-together"
invariant = "i"
corpus = "{corpus}"
rule = "tokens"
replay = "natural"
[axis]
name = "batch"
reference = "alone"
variants = ["together"]
[control]
mode = "free"
"""


def output(text="", first=None):
    return Output(text=text, first=first or {}, encode=lambda choice: tuple(choice.encode()))


@pytest.mark.parametrize(("item", "text", "points"), [
    (Item(request="r", judge="exact", answers=("Paris", "paris")), "  Paris\n", 1),
    (Item(request="r", judge="exact", answers=("Paris",)), "Paris, of course", 0),
    (Item(request="r", judge="regex", pattern=r"\b2021-05-03\b"), "on 2021-05-03.", 1),
    (Item(request="r", judge="regex", pattern=r"\b2021-05-03\b"), "on 2021-05-030", 0),
    (Item(request="r", judge="numeric", answers=("42",)), "7 and then 42.0", 1),
    (Item(request="r", judge="numeric", answers=("1234.5",)), "it is 1,234.50 dollars", 1),
    (Item(request="r", judge="numeric", answers=("42",)), "42 or 43", 0),
    (Item(request="r", judge="numeric", answers=("42",)), "none", 0),
    (Item(request="r", judge="json_schema", schema={"type": "object", "required": ["a"]}), ' {"a": 1}\n', 1),
    (Item(request="r", judge="json_schema", schema={"type": "object", "required": ["a"]}), '{"b": 1}', 0),
    (Item(request="r", judge="json_schema", schema={"type": "object"}), '{"a": 1} and more', 0),
])  # fmt: skip
def test_text_judges(item, text, points):
    found = judge(item, output(text))
    assert found.points == points
    assert found.saw


def test_a_choice_is_the_likeliest_first_token_and_one_that_is_not_reported_earns_nothing():
    item = Item(request="r", judge="choice", choices=("A", "B", "C"), answers=("B",))
    assert judge(item, output(first={65: -2.0, 66: -1.0, 99: -0.1})).points == 1
    assert judge(item, output(first={65: -1.0, 66: -2.0})).points == 0
    assert "no choice" in judge(item, output(first={99: -0.1})).saw
    twice = Item(request="r", judge="choice", choices=("A1", "A2"), answers=("A1",))
    assert "same token" in judge(twice, output(first={65: -1.0})).saw


def test_scores_say_which_items_moved_and_what_it_cost():
    key = [Item(request=name, judge="numeric", answers=("1",)) for name in ("kept", "lost", "gained", "cosmetic")]
    here = {"kept": output("1"), "lost": output("1"), "gained": output("2"), "cosmetic": output("so 1")}
    there = {"kept": output("1"), "lost": output("3"), "gained": output("1"), "cosmetic": output("hence 1")}
    arms = ScoredArms(label="cell[a-b]", arms="pair", verdict="FAIL", items=tuple(key), questions={},
                      outputs=(here, there))  # fmt: skip
    score = score_pair(arms, judge)
    assert (score.reference, score.variant, score.total) == (3, 3, 4)
    assert [(one.request, one.points) for one in score.moved] == [("lost", -1), ("gained", 1), ("cosmetic", 0)]
    assert "3 answers moved, 1 points gained, 1 lost; FAIL" in score.sentence
    record = {
        "schema": 2,
        "exit_code": 1,
        "engine": "e",
        "model": "m|<b>",
        "sentence": "s",
        "judge": None,
        "scores": [score.to_json()],
        "unscored": [],
    }
    page = render_evaluation(record)
    assert "| lost | -1 | 1 | 3 |" in page
    assert "<b>" not in page
    assert "m|&lt;b&gt;" in render_evaluation_page(record)
    assert "  -1 lost: 1 -> 3" in evaluation_table(record)


@pytest.mark.parametrize(("change", "message"), [
    ({"schema": 2}, "expected"),
    ({"corpus": "e"}, "digest"),
    ({"items": [{"request": "a", "judge": "numeric", "answer": "many"}]}, r"items\[0\].answer"),
    ({"items": [{"request": "a", "judge": "regex", "pattern": "("}]}, "no regular expression"),
    ({"items": [{"request": "a", "judge": "choice", "choices": ["x"], "answer": "y"}]}, "one of the choices"),
    ({"items": [{"request": "a", "judge": "json_schema", "schema": {"type": 7}}]}, "no JSON schema"),
    ({"items": [{"request": "a", "judge": "exact", "answers": ["x"], "more": 1}]}, "unknown key"),
    ({"items": [{"request": "a", "judge": "exact"}]}, "needs 'answers'"),
    ({"items": [{"request": "a", "judge": "guess"}]}, "judge"),
    ({"items": [{"request": "a", "judge": "model"}]}, "needs 'answers'"),
    ({"items": [{"request": "b", "judge": "exact", "answers": ["x"]}]}, "one item for each request"),
    ({"items": []}, "one item for each request"),
])  # fmt: skip
def test_a_key_with_a_mistake_is_refused(tmp_path, change, message):
    file = tmp_path / "answers.json"
    file.write_text(json.dumps({"schema": 1, "corpus": "d", "items": []} | change))
    with pytest.raises(CorpusError, match=message):
        read_key(file, "d", ["a"])


def test_the_shipped_key_covers_its_corpus_and_every_judge():
    corpus = load_corpus("eval")
    key = read_key(corpus.path / "answers.json", corpus.digest, [request.id for request in corpus.requests])
    assert {item.judge for item in key} == {"exact", "regex", "numeric", "choice", "json_schema"}


def run(tmp_path, corpus, *settings):
    cell = tmp_path / "asked.toml"
    cell.write_text(CELL.format(corpus=corpus))
    folder = tmp_path / "run"
    command = ["run", str(cell), "--engine", "fake", "--out", str(folder), "--quiet", *settings]
    CliRunner().invoke(commands, command, standalone_mode=False)
    return CliRunner().invoke(commands, ["eval", str(folder)], standalone_mode=False), folder


def test_a_run_is_scored_beside_its_verdict(tmp_path):
    result, folder = run(tmp_path, "eval")
    assert result.return_value == 0, result.output
    record = json.loads((folder / "eval.json").read_text())
    pair, control = record["scores"]
    assert (pair["arms"], pair["total"], pair["moved"]) == ("pair", 16, [])
    assert control["arms"] == "control"
    key = (load_corpus("eval").path / "answers.json").read_bytes()
    assert record["keys"] == {"eval": hashlib.sha256(key).hexdigest()}
    assert len(control["moved"]) > 0, "the control's answers never moved, so nothing shows that moving is found"
    assert "asked-together" in (folder / "eval.md").read_text()


def test_drift_of_a_pair_is_found(tmp_path):
    result, folder = run(tmp_path, "eval", "--set", "invariant=false")
    assert result.return_value == 1, result.output
    pair = json.loads((folder / "eval.json").read_text())["scores"][0]
    assert pair["verdict"] == "FAIL"
    assert len(pair["moved"]) > 0


def test_what_cannot_be_scored_is_said(tmp_path):
    result, _ = run(tmp_path, "smoke")
    assert "no answer key" in str(result.exception)
