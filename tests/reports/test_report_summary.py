"""The Markdown summary."""

from __future__ import annotations

import re

import pytest
import run_samples

from harness.errors import StoreError
from reports.summary import LIMIT, code, plain, summary


def rows(text):
    return [line for line in text.splitlines() if line.startswith("| ") and not line.startswith("| verdict")]


def test_failures_come_first_then_the_table_worst_first():
    text = summary(run_samples.mixed())
    assert text.startswith("## ❌ samebits: engine error\n")
    assert text.index("process-restart[same-new] ERROR") < text.index("alone-vs-batch[alone-batch] FAIL")
    assert text.index("arrivals[alone-staggered] INSUFFICIENT") < text.index("| verdict | cell |")
    assert len(rows(text)) == 10
    assert rows(text)[0].startswith("| ❌ ERROR | `process-restart[same-new]` |")
    assert "known-broken[off-on] FAIL (expected)" not in text  # an expected FAIL is no failure
    assert "| ✅ FAIL (expected) | `known-broken[off-on]` |" in text


def test_what_bounds_a_pass_is_said():
    text = summary(run_samples.mixed())
    assert "| ✅ PASS ⚠️ weak corpus | `arrival-order[given-reversed]` |" in text
    assert "- weak corpus: its longest prompt has 96 tokens" in text
    assert "- 1 with control: comparator only" in text
    assert "0.91 of free" in text


def test_all_pass():
    text = summary(run_samples.all_pass())
    assert text.startswith("## ✅ samebits: accepted\n")
    assert "```" not in text
    assert "exit code 0" in text


def test_unjudged_pairs_are_said():
    run = run_samples.all_pass()
    run["plan"]["pairs"] = 9
    assert "**8 of 9 planned pairs were judged**" in summary(run)
    assert summary(run).startswith("## ❌")


@pytest.mark.parametrize("count", [30, 400, 2000])
def test_the_limit_holds_and_what_is_left_out_is_counted(count):
    run = run_samples.many(count)
    text = summary(run)
    assert len(text.encode()) < LIMIT
    left = int(re.search(r"([\d,]+) more verdicts", text)[1].replace(",", "")) if "more verdicts" in text else 0
    assert len(rows(text)) + left == len(run["verdicts"])
    hidden = int(re.search(r"…and ([\d,]+) more open", text)[1].replace(",", "")) if "more open" in text else 0
    assert text.count("```text") + hidden == count // 2
    assert (left > 0) == (count > 30)


def test_long_and_wide_texts_do_not_break_the_limit():
    wide = {"reason": "漢" * 90_000, "invariant": "🙂" * 90_000, "rule": "r" * 90_000}
    run = run_samples.run([run_samples.failed(f"cell-{i}-" + "🙂" * 5000, **wide) for i in range(50)], exit_code=1,
                          outcome="漢" * 90_000, samebits="s" * 90_000)  # fmt: skip
    run["matrix"] = {"name": "m" * 90_000, "digest": "d" * 90_000}
    run["cost"] = {f"c{i}" + "x" * 9_000: "y" * 90_000 for i in range(40)}
    assert len(summary(run).encode()) < LIMIT


def unquoted(text):
    """The summary without its code: what Markdown would interpret."""
    text = re.sub(r"^(`{3,})text\n.*?^\1$", "", text, flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"(`+)(?!`).*?(?<!`)\1(?!`)", "", text)


def test_hostile_text_stays_text():
    text = unquoted(summary(run_samples.hostile()))
    assert "<script" not in text.replace("\\<", "")
    assert re.search(r"(?<!\\)\[l\]\(", text) is None
    assert "@all" not in text
    assert re.search(r"#\d", text) is None
    assert "\x1b" not in text
    found = rows(summary(run_samples.hostile()))
    assert [len(re.findall(r"(?<!\\)\|", row)) for row in found] == [9] * 10


def test_a_block_of_a_failure_cannot_be_ended_from_inside():
    text = summary(run_samples.run([run_samples.failed("`````", "1-2")], exit_code=1))
    fence = re.search(r"^(`+)text$", text, re.MULTILINE)[1]
    assert fence == "`" * 6
    assert text.count(f"\n{fence}\n") == 1


@pytest.mark.parametrize("text", ["`", "``", "a`b", "`a`", "a|b", "```x", "", "a\nb", "| |"])
def test_code_spans_cannot_be_ended_from_inside(text):
    shown = code(text)
    fence = re.match(r"`+", shown)[0]
    inner = shown[len(fence) : -len(fence)]
    assert shown.endswith(fence)
    assert fence not in re.findall(r"`+", inner)
    assert re.search(r"(?<!\\)\|", shown) is None
    assert "\n" not in shown


def test_plain_text_links_and_mentions_nobody():
    assert plain("@me http://x www.x.y #1") == "@\u200bme http:\u200b//x www\u200b.x.y \\#\u200b1"


def test_nulls_and_another_schema():
    assert "no verdicts" in summary(run_samples.nulls(run_samples.mixed()))
    assert "None" not in summary(run_samples.inner_nulls(run_samples.mixed()))
    with pytest.raises(StoreError):
        summary({"schema": 2})
