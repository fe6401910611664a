"""A census counts every copy: distinct completions, where they part, company seen, and the exit code."""

import json
from dataclasses import replace

import numpy as np
import pytest
from click.testing import CliRunner
from made_traces import make_steps, make_traces, with_positions

from harness.census import CLEAN, FOUND, NO_COMPANY, count_census
from harness.census.rounds import Design, build_rounds
from harness.census.tree import build_tree
from harness.cli import commands
from harness.corpus import load_corpus
from harness.draws import Draws
from harness.occupancy import occupancy


def prompts(count=2):
    return load_corpus("smoke").requests[:count]


def design(**changes):
    return Design(**{"n": 5, "seeds": 2, "per_round": 4, "seed": 3, "max_tokens": 6} | changes)


def test_draws_are_the_same_everywhere_and_within_their_limits():
    draws = Draws(7, "a test")
    assert [draws.below(1000) for _ in range(4)] == [38, 724, 876, 66]
    assert Draws(7, "a test").unit() != Draws(8, "a test").unit() != Draws(8, "another").unit()
    many = [draws.below(3) for _ in range(3000)]
    assert {many.count(value) // 100 for value in range(3)} <= {9, 10}
    assert sorted(draws.shuffled(range(20))) == list(range(20))
    gaps = [draws.gap(4.0) for _ in range(2000)]
    assert min(gaps) == 0
    assert 3.2 < sum(gaps) / len(gaps) < 3.8  # whole steps: a mean of 4 is cut by about a half


def test_rounds_hold_every_prompt_n_times_and_every_seed_twice():
    rounds = build_rounds(prompts(), load_corpus("random").requests[:3], design())
    copies = [copy for one in rounds for copy in one.copies]
    assert len(copies) == len({copy.request.id for copy in copies}) == 2 * (5 + 2 * 2)
    for prompt in prompts():
        mine = [copy for copy in copies if copy.prompt == prompt.id]
        assert {copy.request.prompt_token_ids for copy in mine} == {prompt.prompt_token_ids}
        assert [copy.seed for copy in mine].count(None) == 5
        assert sorted(copy.seed for copy in mine if copy.seed is not None) == [0, 0, 1, 1]
    for copy in copies:
        assert (copy.request.sampling.temperature == 0) is (copy.seed is None)
        assert copy.request.sampling.max_tokens == 6
    assert {len(one.copies) for one in rounds} > {1}, "company never changes"
    for one in rounds:
        judged = {arrival.request for arrival in one.schedule.arrivals if not arrival.companion}
        assert judged == {copy.request.id for copy in one.copies}
        assert len(one.schedule.arrivals) == len(one.requests)


def test_the_tree_says_where_paths_part_and_how_many_took_each():
    tree = build_tree({(1, 2, 3): 6, (1, 2, 4): 1, (1, 5): 2, (1, 2): 1})
    assert [(b.depth, b.start, b.tokens, b.count, b.completions) for b in tree] == [
        (0, 0, (1,), 10, 4), (1, 1, (2,), 8, 3), (2, 2, (3,), 6, 1), (2, 2, (4,), 1, 1), (2, 2, (), 1, 1),
        (1, 1, (5,), 2, 1),
    ]  # fmt: skip
    assert [(b.tokens, b.count) for b in build_tree({(1, 2): 3})] == [((1, 2), 3)]


def answered(rounds, answer):
    """Captures of the rounds; `answer` gives each copy's tokens."""
    captures = []
    for one in rounds:
        names = tuple(copy.request.id for copy in one.copies)
        traces = make_traces(names, tuple(4 for _ in names))
        tokens = np.array([token for copy in one.copies for token in answer(copy)], np.int32)
        captures.append(with_positions(traces, token=tokens, pick=tokens))
    return captures


def test_one_deviant_among_all_copies_is_found_and_located():
    rounds = build_rounds(prompts(), (), design(seeds=0))
    odd = f"{prompts()[1].id}#3"
    census = count_census(design(seeds=0), rounds, answered(
        rounds, lambda copy: (1, 2, 9, 9) if copy.request.id == odd else (1, 2, 3, 4)))  # fmt: skip
    by_name = {one.prompt: one for one in census.prompts}
    assert [by_name[prompt.id].answers.distinct for prompt in prompts()] == [1, 2]
    found = by_name[prompts()[1].id]
    assert (found.answers.modal.count, found.answers.modal.total, found.answers.position) == (4, 5, 2)
    assert [(branch.start, branch.count) for branch in found.tree] == [(0, 5), (2, 4), (2, 1)]
    assert census.exit_code == FOUND


def test_a_seed_that_gives_two_answers_is_found():
    rounds = build_rounds(prompts(1), (), design())
    said = iter(range(1, 100))
    census = count_census(design(), rounds, answered(
        rounds, lambda copy: (1, 2, 3, 4) if copy.seed != 1 else (next(said), 2, 3, 4)))  # fmt: skip
    one = census.prompts[0]
    assert (one.seeds.count, one.seeds.total, one.answers.distinct) == (1, 2, 1)
    assert census.exit_code == FOUND


def test_without_evidence_of_company_one_completion_is_no_clean_result():
    rounds = build_rounds(prompts(1), (), design(seeds=0))
    captures = answered(rounds, lambda _: (1, 2, 3, 4))
    assert count_census(design(seeds=0), rounds, captures).exit_code == NO_COMPANY
    alone = [replace(one, steps=make_steps([(j, j, 0, 1) for j in range(len(one.requests.id))])) for one in captures]
    assert occupancy(alone).running == ((1, 5),)
    assert count_census(design(seeds=0), rounds, alone).exit_code == NO_COMPANY
    together = [replace(one, steps=make_steps([(0, j, 0, 1) for j in range(len(one.requests.id))])) for one in captures]
    assert occupancy(together).most > 1
    assert count_census(design(seeds=0), rounds, together).exit_code == CLEAN


def run(tmp_path, *options):
    folder = tmp_path / "out"
    command = ["census", *options, "--out", str(folder), "--quiet"]
    result = CliRunner().invoke(commands, command, standalone_mode=False)
    assert result.exception is None, result.output
    return result, json.loads((folder / "census.json").read_text()), (folder / "census.html").read_text()


@pytest.mark.parametrize(("mode", "code"), [("portable", CLEAN), ("free", FOUND)])
def test_tiny_gives_one_completion_in_portable_and_more_in_free(tmp_path, mode, code):
    result, record, page = run(tmp_path, "census", "--model", "tiny", "--mode", mode, "--n", "30", "--set", "threads=1")
    assert result.return_value == code, result.output
    distinct = {one["prompt"]: one["distinct"] for one in record["prompts"]}
    assert (max(distinct.values()) > 1) is (code == FOUND)
    assert all(one["modal"]["total"] == 30 for one in record["prompts"])
    assert max(map(int, record["company"]["running"])) > 4
    assert record["sentence"] in page
    assert len(distinct) > 1, "one easy prompt can hide everything"
    assert ("where paths part" in result.output) is (code == FOUND)
    for one in (one for one in record["prompts"] if one["distinct"] == 2):
        assert f"{30 - one['modal']['count']} x from token {one['first_divergence']}: " in result.output


def test_the_fake_engine_keeps_its_seeds_and_loses_them_with_noise(tmp_path):
    options = ("smoke", "--engine", "fake", "--prompts", "2", "--n", "6", "--seeds", "3", "--companions", "none")
    result, record, _ = run(tmp_path, *options)
    assert result.return_value == CLEAN, result.output
    assert all(one["seeds"]["count"] == 3 and one["seed_distinct"] > 1 for one in record["prompts"])
    result, record, _ = run(tmp_path / "noisy", *options, "--set", "fault=noise")
    assert result.return_value == FOUND, result.output


def test_an_engine_that_runs_one_at_a_time_shows_nothing(tmp_path):
    options = ("smoke", "--engine", "fake", "--prompts", "1", "--n", "4", "--set", "max_num_seqs=1")
    result, record, _ = run(tmp_path, *options)
    assert result.return_value == NO_COMPANY, result.output
    assert "says nothing about company" in record["sentence"]


def test_a_used_folder_and_a_bad_companion_are_refused(tmp_path):
    (tmp_path / "file").write_text("x")
    for options in (["--out", str(tmp_path)], ["--out", str(tmp_path / "new"), "--companions", "many"]):
        result = CliRunner().invoke(commands, ["census", "smoke", "--engine", "fake", *options], standalone_mode=False)
        assert result.exception is not None
        assert type(result.exception).__name__ == "UsageError"
