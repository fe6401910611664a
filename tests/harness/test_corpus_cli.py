"""`samebits corpus freeze`, `verify` and `show`."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from click.testing import CliRunner, Result
from corpus_making import request_value, write_corpus

import harness.registry
from engines.bundled.tokenizer import ByteTokenizer
from harness.corpus import load_corpus
from harness.corpus.cli import corpus_commands
from harness.corpus.show import length_bins
from harness.errors import CorpusError, UsageError


def corpus(*arguments: object) -> Result:
    return CliRunner().invoke(corpus_commands, [str(argument) for argument in arguments])


@pytest.fixture
def traffic(tmp_path, monkeypatch):
    """A file of two lines, and an engine whose tokenizer says which model it was asked for."""

    class Tokens:
        def tokenizer(self, model: str) -> ByteTokenizer:
            return {"tiny": ByteTokenizer(512)}[model]

    monkeypatch.setattr(harness.registry, "adapter", {"scripted": Tokens()}.__getitem__)
    source = tmp_path / "traffic.jsonl"
    lines = [{"id": "a", "text": "one", "temperature": 1}, {"text": "two", "top_k": 3}]
    source.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return source


def freeze(traffic, *arguments: object) -> Result:
    return corpus("freeze", traffic, "--engine", "scripted", "--model", "tiny", *arguments)


def test_freeze_reports_everything_it_filled_in(traffic, tmp_path):
    result = freeze(traffic, "--out", tmp_path / "mine", "--max-tokens", 7, "--default", "min_p=0.25")
    assert result.exit_code == 0, result.exception
    frozen = load_corpus(str(tmp_path / "mine"))
    lines = result.output.splitlines()
    assert lines[0].endswith("mine: 2 requests, 6 prompt tokens, longest prompt 3")
    assert f"digest {frozen.digest}" in lines
    assert "ids assigned by line number: 1 (r0002 to r0002)" in lines
    assert "default max_tokens = 7 for 2 of 2 requests" in lines
    assert "default min_p = 0.25 for 2 of 2 requests" in lines
    assert "default temperature = 0.0 for 1 of 2 requests" in lines
    assert f"seed {frozen.requests[0].sampling.seed} derived for request a" in lines
    assert lines[-1].startswith("weak corpus: its longest prompt has 3 tokens")
    assert (frozen.name, frozen.tokenizer.name) == ("mine", "tiny")


def test_freeze_takes_a_name_a_description_and_arbitrary_ids(traffic, tmp_path):
    result = freeze(
        traffic, "--out", tmp_path / "mine", "--name", "n", "--description", "d", "--arbitrary-ids", "logit_bias"
    )
    assert result.exit_code == 0
    frozen = load_corpus(str(tmp_path / "mine"))
    assert (frozen.name, frozen.description, frozen.arbitrary_ids) == ("n", "d", ("logit_bias",))


def test_freeze_needs_force_to_replace(traffic, tmp_path):
    assert freeze(traffic, "--out", tmp_path / "mine").exit_code == 0
    refused = freeze(traffic, "--out", tmp_path / "mine")
    assert isinstance(refused.exception, CorpusError)
    assert freeze(traffic, "--out", tmp_path / "mine", "--force").exit_code == 0


def test_freeze_keeps_the_source_when_asked(traffic, tmp_path):
    assert freeze(traffic, "--out", tmp_path / "mine", "--keep-source").exit_code == 0
    assert (tmp_path / "mine" / "source.jsonl").read_bytes() == traffic.read_bytes()


@pytest.mark.parametrize(
    ("pair", "expected"),
    [
        ("temperatur=1", "did you mean 'temperature'"),
        ("temperature", "expected FIELD=JSON"),
        ("seed=1", "expected FIELD=JSON"),
        ("temperature=hot", "expected one JSON value"),
        ("temperature=-1", "expected a finite number of at least 0, found -1 (int)"),
    ],
)
def test_freeze_refuses_a_bad_default(traffic, tmp_path, pair, expected):
    result = freeze(traffic, "--out", tmp_path / "mine", "--default", pair)
    assert isinstance(result.exception, UsageError)
    assert expected in str(result.exception)
    assert not (tmp_path / "mine").exists()


def test_many_seeds_are_counted(traffic, tmp_path):
    lines = [{"text": f"line {number}", "temperature": 1} for number in range(25)]
    traffic.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    output = freeze(traffic, "--out", tmp_path / "mine").output
    assert output.count(" derived for request ") == 20
    assert "... and 5 more seeds, all in requests.jsonl" in output


def test_verify_names_what_it_checked(tmp_path):
    folder = write_corpus(tmp_path / "c", [request_value()])
    result = corpus("verify", folder, "smoke")
    assert result.exit_code == 0
    assert f"hand-made: 1 requests, digest {load_corpus(str(folder)).digest} (path {folder})" in result.output
    assert "smoke: 8 requests, digest" in result.output


def test_verify_collects_what_is_wrong_with_all_of_them(tmp_path):
    folders = [write_corpus(tmp_path / name, [request_value()]) for name in ("c", "d")]
    for folder in folders:
        (folder / "requests.jsonl").write_text("{}\n", encoding="utf-8")
    result = corpus("verify", folders[0], "smoke", folders[1])
    assert isinstance(result.exception, CorpusError)
    assert result.exception.exit_code == 2
    assert "smoke: 8 requests" in result.output
    for folder in folders:
        assert f"corpus {folder}: " in str(result.exception)


def test_show_prints_lengths_sampling_and_a_sample(tmp_path):
    values = [request_value("[red]a", temperature=0.5, seed=3, top_k=4), request_value("b", logit_bias=[[1, 1.0]])]
    values[1]["text"], values[1]["prompt_token_ids"] = "x\ny" + "z" * 100, [1] * 40
    folder = write_corpus(tmp_path / "c", values, description="made by hand")
    result = corpus("show", folder, "--sample", 2)
    assert result.exit_code == 0, result.exception
    for part in (
        "hand-made  made by hand",
        f"digest     {load_corpus(str(folder)).digest}",
        "weak corpus: its longest prompt has 40 tokens",
        "2 prompts, 43 tokens: shortest 3, median 40, longest 40",
        "0-15 tokens # 1",
        "32-63 tokens # 1",
        "greedy (temperature 0)       1",
        "seeded (temperature above 0) 1",
        "logit bias                   1",
        "[red]a  3       T 0.5 seed 3  text of [red]a",
        "b       40      greedy        x\\nyzzz",
    ):
        assert part in result.output
    assert "token ids only" not in result.output


def test_a_length_on_an_edge_falls_into_one_bin():
    assert length_bins([0, 15, 16, 1023, 1024]) == [("0-15", 2), ("16-31", 1), ("512-1023", 1), ("1024+", 1)]


def test_show_without_a_sample_prints_none():
    assert "attic" in corpus("show", "smoke").output
    assert "attic" not in corpus("show", "smoke", "--sample", 0).output


def test_show_of_a_view():
    output = corpus("show", "quick:greedy").output
    assert output.startswith("quick:greedy")
    assert "seeded (temperature above 0)" not in output


def test_importing_the_commands_is_light():
    code = "import sys, harness.corpus.cli; print(*sorted(sys.modules))"
    modules = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    heavy = {"torch", "vllm", "pandas", "pyarrow", "jinja2", "numpy", "rich", "tokenizers", "harness.corpus.freeze"}
    assert "harness.corpus.cli" in modules
    assert not heavy & set(modules)
