"""The HTML page: complete, escaped, self-contained and well-formed."""

from __future__ import annotations

import copy
import re
from html.parser import HTMLParser

import pytest
import run_samples
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.errors import StoreError
from reports.html import render_report
from reports.junit import render_junit
from reports.record import RequestRow
from reports.strip import BINS, draw_strips
from reports.summary import LIMIT, summary
from reports.table import plain_table

VOID = {"meta", "br", "hr", "img", "link", "input"}
SVG_EMPTY = {"rect", "line"}


class Page(HTMLParser):
    """A strict reader: tags must nest, ids be unique, and text is collected."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.stack, self.tags, self.attributes, self.text = [], [], [], []
        self.feed(text)
        self.close()
        assert self.stack == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in VOID:
            self.stack.append(tag)

    def handle_startendtag(self, tag, attrs):
        assert tag in SVG_EMPTY | VOID
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag):
        assert self.stack.pop() == tag

    def handle_data(self, data):
        if not self.stack or self.stack[-1] != "style":
            self.text.append(data)

    @property
    def words(self):
        return " ".join(" ".join(self.text).split())

    def values(self, name):
        return [value for key, value in self.attributes if key == name]


def page(run):
    return Page(render_report(run))


SAMPLES = {
    "pass": run_samples.all_pass,
    "mixed": run_samples.mixed,
    "hostile": run_samples.hostile,
    "many": lambda: run_samples.many(40),
}


@pytest.mark.parametrize("sample", sorted(SAMPLES))
def test_pages_are_well_formed_and_load_nothing(sample):
    found = page(SAMPLES[sample]())
    assert "script" not in found.tags
    assert not {"link", "img", "iframe", "object", "embed", "form", "base"} & set(found.tags)
    assert found.values("src") == []
    assert all(re.fullmatch(r"#(v\d+|settings)", value) for value in found.values("href"))
    assert not [name for name, _ in found.attributes if name.startswith("on")]
    ids = found.values("id")
    assert len(ids) == len(set(ids))
    assert {value[1:] for value in found.values("href")} <= set(ids)
    assert "url(" not in render_report(run_samples.all_pass())
    assert "http" not in render_report(run_samples.all_pass()).replace("http-equiv", "")


def test_the_banner_tells_decision_exit_code_and_outcome():
    words = page(run_samples.mixed()).words
    assert "Engine error An engine did not answer or answered wrongly (exit code 4)." in words
    assert "1 cell ended in an engine ERROR: process-restart[same-new]" in words
    assert (
        "Accepted Every planned cell was judged and none is open (exit code 0)." in page(run_samples.all_pass()).words
    )


def test_every_verdict_has_its_row_and_its_details():
    run = run_samples.mixed()
    found = page(run)
    for verdict in run["verdicts"]:
        assert found.words.count(verdict["label"]) >= 2
    assert found.tags.count("details") >= 10
    for word in ("PASS", "FAIL", "APPROVED", "FAIL (expected)", "INSUFFICIENT", "UNSUPPORTED", "ERROR"):
        assert f" {word} " in found.words


def test_what_bounds_a_pass_stands_beside_it():
    words = page(run_samples.mixed()).words
    assert "PASS ⚠ weak corpus, longest prompt 96 tokens arrival-order[given-reversed]" in words
    assert "control: comparator only planted fault found" in words
    assert "1 verdict rests on a weak corpus" in words
    assert "What it does not show cpu.microcode is unknown on both sides" in words
    assert "Expected here: this cell exists to show FAIL, and it did." in words
    assert "What this PASS is worth 3456 elements over 288 positions of 12 requests compared" in words
    assert "weak" not in page(run_samples.run([run_samples.verdict()])).words


def test_only_good_verdicts_are_warned_of():
    failed = run_samples.failed()
    failed["corpus"] = run_samples.weak()["corpus"]
    assert "Before a PASS is believed" not in page(run_samples.run([failed], exit_code=1)).words


def test_a_failure_is_explained():
    words = page(run_samples.run([run_samples.failed()], exit_code=1)).words
    for text in (
        "Rejected", "Diagnosis: forward layer", "First divergence: request quick-01 , position 5, field logprob",
        "reference (alone) -1.3862944", "variant (batch) -1.3862946", "2 ulp, Δlogprob -2.38e-07",
        "near tie, reference's top two 0.0125 apart", "48 of 288 positions in 9 of 12 requests",
        "logprob 48, topk_logprobs 47, topk_ids 4, pick 2", "first at 0, 7 of 24 positions differ",
        "3 requests equal at every position.", "judged digest of the variant: sha256:" + "2e" * 32,
    ):  # fmt: skip
        assert text in words, text


def test_a_floor_that_differs_is_told_as_the_reference_twice():
    words = page(run_samples.run([run_samples.run_to_run()], exit_code=1)).words
    assert "DIFFERS 288 positions" in words
    assert "reference -1.3862944" in words
    assert "reference again -1.3862946" in words
    assert "variant (" not in words


def test_undeclared_differences_and_logs_are_shown():
    words = page(run_samples.mixed()).words
    assert "env.OMP_NUM_THREADS: 2 -> not set" in words
    assert "not enough memory" in words
    assert "22 earlier lines" in words


def test_the_environment_is_told_by_class():
    words = page(run_samples.all_pass()).words
    assert "identity must match for equal bits to be expected at all (10 fields)" in words
    assert "cpu.isa.level x86-64-v4 the same /proc/cpuinfo" in words
    assert "env.OMP_NUM_THREADS 1 2 environment" in words
    assert "2 more environment variables that can move a bit, not set env.MKL_CBWR, env.OMP_SCHEDULE" in words
    assert "container.image unknown, because a container cannot see its image's digest" in words
    assert "context recorded, never compared (2 fields)" in words


def test_the_head_names_what_was_chosen_and_the_rest_is_further_down():
    text = render_report(run_samples.mixed())
    head, _, rest = text.partition("</header>")
    assert "<code>arithmetic=portable</code>" in head
    assert "threads=2" not in head
    assert "<code>arithmetic=portable</code>, <code>threads=2</code>" in rest
    assert 'href="#settings">all 2<' in head
    assert 'id="settings"' in rest


def test_times_are_utc_and_cost_is_shown():
    words = page(run_samples.mixed()).words
    assert "Started 2026-03-01 12:00:00 UTC" in words
    assert "2 min 31 s (2 min 27 s in engine processes, 4.3 s outside)" in words
    assert "What the mode costs deterministic decode runs at 0.91" in words


def test_unjudged_pairs_are_said_at_the_top():
    run = run_samples.all_pass()
    run["plan"]["pairs"] = 9
    words = page(run).words
    assert words.index("8 of 9 planned pairs were judged") < words.index("Verdicts")
    assert "Nothing was judged." in page(run_samples.run([])).words


def test_hostile_text_is_shown_as_text():
    found = page(run_samples.hostile())
    assert "<script>alert(1)</script>" in found.words
    assert "&amp; \"q\" 'a'" in found.words  # an entity in the input is shown as it was written
    assert not set("\x00\x1b\u202e") & set(found.words)


def test_colour_is_never_alone():
    found = page(run_samples.mixed())
    badges = [value for value in found.values("class") if value and value.startswith("badge ")]
    assert len(badges) == 20
    for mark in ("✓ PASS", "✗ FAIL", "? INSUFFICIENT", "– UNSUPPORTED", "! ERROR"):
        assert mark in found.words
    assert found.values("aria-label").count("first at 22, 2 of 24 positions differ") > 0


def test_open_verdicts_start_unfolded_up_to_a_number():
    text = render_report(run_samples.many(60))
    assert len(re.findall(r'<details class="verdict is-bad" open>', text)) == 12
    assert '<details class="verdict is-good" open>' not in text
    text = render_report(run_samples.mixed())
    assert '<details class="verdict is-open" open>' in text
    assert '<details class="verdict is-idle">' in text


@pytest.mark.parametrize("empty", [run_samples.nulls, run_samples.inner_nulls])
def test_nulls_make_a_page(empty):
    words = page(empty(run_samples.mixed())).words
    assert "No decision" in words
    assert " None" not in words


def test_another_schema_is_refused():
    with pytest.raises(StoreError):
        render_report({"schema": 2})


def row(positions, where=(), first=None, differing=None):
    return RequestRow(request="r", positions=positions, differing=len(where) if differing is None else differing,
                      first=first if first is not None else min(where, default=None), where=tuple(where))  # fmt: skip


def test_strips_lie_on_positions():
    strips = draw_strips([row(24, [0, 1, 5, 23]), row(12), row(12, [11])])
    assert list(strips.drawn[0].bars) == [(0, 2, 1), (5, 1, 1), (23, 1, 1)]
    assert (strips.columns, strips.equal, strips.drawn[1].width) == (24, 1, 12)
    assert strips.drawn[1].bars == ((11, 1, 1),)
    assert strips.drawn[0].words == "first at 0, 4 of 24 positions differ"


def test_strips_show_every_difference_however_many_positions_share_a_column():
    short, long = draw_strips([row(3, [2]), row(3000, [0, 26, 2999])]).drawn
    assert (short.width, short.bars) == (1, ((0, 1, 1),))
    assert (long.width, long.bars) == (240, ((0, 1, 1), (2, 1, 1), (239, 1, 1)))


def test_strips_without_places_are_an_estimate_from_the_first_on():
    (strip,) = draw_strips([row(24, first=6, differing=9)]).drawn
    assert (strip.bars, strip.exact) == (((6, 1, 1), (7, 17, 8 / 17)), False)
    (alone,) = draw_strips([row(24, first=6, differing=1)]).drawn
    assert alone.bars == ((6, 1, 1),)
    (whole,) = draw_strips([row(24, first=6, differing=18)]).drawn
    assert (whole.bars, whole.exact) == (((6, 18, 1),), True)
    run = run_samples.run([run_samples.failed()], exit_code=1)
    for item in run["verdicts"][0]["diagnosis"]["per_request"]:
        del item["where"]
    assert "as high as the share that differs" in page(run).words


@given(st.lists(st.builds(row, st.integers(0, 3000), st.lists(st.integers(-5, 4000), max_size=8)), max_size=5))
def test_strips_never_leave_their_request(rows):
    strips = draw_strips(rows)
    assert 1 <= strips.columns <= BINS
    assert len(strips.drawn) + strips.equal + strips.hidden == len(rows)
    for strip in strips.drawn:
        assert strip.width <= strips.columns
        assert all(0 <= bar.start < bar.start + bar.width <= strip.width for bar in strip.bars)
        assert all(0 < bar.share <= 1 for bar in strip.bars)


def paths(value, path=()):
    yield path
    if isinstance(value, dict):
        for key in value:
            yield from paths(value[key], (*path, key))
    elif isinstance(value, list):
        for index in range(len(value)):
            yield from paths(value[index], (*path, index))


MIXED = run_samples.run(
    [run_samples.failed(requests=2), run_samples.error(), run_samples.comparator_only()],
    exit_code=1,
    cost={"decode": 0.9},
)
PATHS = [path for path in paths(MIXED) if path and path != ("schema",)]
JUNK = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=20)
    | st.just([])
    | st.just({})
    | st.just([None])
)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(PATHS), JUNK), min_size=1, max_size=4))
def test_any_damaged_record_makes_every_report(changes):
    run = copy.deepcopy(MIXED)
    for path, value in changes:
        target = run
        try:
            for key in path[:-1]:
                target = target[key]
            target[path[-1]] = value
        except (TypeError, KeyError, IndexError):  # an earlier change took the place away
            continue
    page(run)
    plain_table(run)
    assert len(summary(run).encode()) < LIMIT
    assert render_junit(run).startswith("<?xml")
