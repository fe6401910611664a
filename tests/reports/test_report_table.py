"""The verdict table, styled and plain."""

from __future__ import annotations

import io
import subprocess
import sys

import pytest
import run_samples
from rich.console import Console

from harness.errors import StoreError
from reports.table import plain_table, verdict_table


def printed(run, width=140):
    console = Console(width=width, file=io.StringIO(), force_terminal=False)
    console.print(verdict_table(run))
    return console.file.getvalue()


def test_one_row_per_verdict_in_the_plans_order():
    run = run_samples.mixed()
    rows = plain_table(run).splitlines()[1 : 1 + len(run["verdicts"])]
    assert [row.split("  ")[0] for row in rows][:3] == ["PASS", "FAIL", "PASS, weak corpus"]
    for row, verdict in zip(rows, run["verdicts"], strict=True):
        assert verdict["label"] in row


@pytest.mark.parametrize("show", [plain_table, printed])
def test_what_bounds_a_pass_is_said(show):
    text = " ".join(show(run_samples.mixed()).split())
    assert "PASS, weak corpus" in text
    assert "! weak corpus: its longest prompt has 96 tokens" in text
    assert "comparator only, fault found" in text
    assert "! cpu.microcode is unknown" in text
    assert "FAIL (expected)" in text
    assert "1 ERROR, 2 FAIL, 1 INSUFFICIENT, 1 UNSUPPORTED, 1 APPROVED, 1 FAIL (expected), 3 PASS." in text


@pytest.mark.parametrize("show", [plain_table, printed])
def test_unjudged_pairs_are_said(show):
    run = run_samples.all_pass()
    run["plan"]["pairs"] = 11
    assert "! 8 of 11 planned pairs were judged" in show(run)
    assert "! none of 3 planned pairs was judged" in show(run_samples.run([], plan={"pairs": 3}))


def test_equal_notes_are_said_once_with_their_cells():
    run = run_samples.run([run_samples.weak(f"cell-{index}") for index in range(5)])
    assert plain_table(run).count("! weak corpus") == 1
    assert "cell-2[given-reversed] and 2 more)" in plain_table(run)


@pytest.mark.parametrize("width", [20, 80, 200])
def test_hostile_text_neither_styles_nor_breaks(width):
    text = printed(run_samples.hostile(), width)
    assert "\x1b" not in text
    assert "\x1b" not in plain_table(run_samples.hostile())
    markup = run_samples.run([run_samples.verdict("[bold red]x[/nope]")])
    assert "[bold red]x[/nope]" in printed(markup)


def test_nulls_are_shown():
    for run in (run_samples.nulls(run_samples.mixed()), run_samples.inner_nulls(run_samples.mixed())):
        assert "verdict" in plain_table(run)
        assert "verdict" in printed(run)
    assert "no verdicts." in plain_table(run_samples.nulls(run_samples.mixed()))


def test_another_schema_is_refused():
    for show in (plain_table, verdict_table):
        with pytest.raises(StoreError):
            show({"schema": 2})


def test_the_table_needs_no_template_engine():
    heavy = ("jinja2", "torch", "numpy", "xml")
    code = f"import sys, reports, reports.table; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
