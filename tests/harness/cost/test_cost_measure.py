"""From the command's options to cost.json, tables, page and gate; on a scripted clock, and once with real processes."""

import dataclasses
import itertools
import json
import math
import re
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from cost_making import ADAPTER, IDS, REQUESTS, TIMER, ScriptedBench, arms, design, scripted, timing

from harness import registry
from harness.cost.arm import choose_arms, configuration_differences
from harness.cost.bench import Subject, open_processes
from harness.cost.cli import cost_command
from harness.cost.comparison import State, compare
from harness.cost.interval import interval, simultaneous
from harness.cost.load import closed_loop
from harness.cost.measure import CostRequest, make_design, measure
from harness.cost.record import read_cost
from harness.cost.session import run_session
from harness.cost.timing import read_timings, write_timings
from harness.engine import Field
from harness.errors import StoreError, UsageError
from harness.settings import parse_assignments
from reports.cost import render_cost, write_cost_report
from reports.cost_table import cost_table

DOCS = Path(__file__).resolve().parents[3] / "docs" / "cost.md"
QUIET = lambda _text: None  # noqa: E731 - a note that nobody reads


def still():
    return itertools.repeat(0.0)


def noisy(seed=0, spread=0.01):
    rng = np.random.default_rng(seed)
    return (rng.normal(0, spread) for _ in itertools.count())


def asked(out, **changes):
    values = {
        "engine": "fake", "model": None, "mode": None, "assignments": ("timer_us=1000",), "on": (), "off": (),
        "shown": None, "corpus": "smoke", "concurrency": "1,4", "rates": None, "trace": None, "count": 8, "pairs": 5,
        "ttft_limit": None, "itl_limit": None, "seed": 0, "slowed": 1.0, "out": out, "overwrite": False,
        "deadline_s": 60.0,
    }  # fmt: skip
    return CostRequest(**{**values, **changes})


def measured(out, noise=None, **changes):
    return measure(asked(out, **changes), QUIET, lambda _subject: scripted(noise or noisy()))[0]


def test_a_record_holds_what_was_measured(tmp_path):
    record = measured(tmp_path / "c", slowed=1.2)
    stored = read_cost(tmp_path / "c" / "cost.json")
    assert json.loads(json.dumps(record)) == stored
    assert (record["state"], record["exit_code"]) == ("resolved", 0)
    assert record["primary"]["ratio"] == pytest.approx(1.2, rel=0.03)
    assert len(record["primary"]["pairs"]) == 5
    assert [turn["arm"] for turn in record["design"]["order"][:6]] == [
        "off", "on", "off again", "off again", "on", "off",
    ]  # fmt: skip
    assert record["gate"]["slowdown"] > record["primary"]["ratio"]
    assert {"slowdown", "slowdown.concurrency 1", "slowdown.concurrency 4", "memory", "startup"} == set(record["gate"])
    assert any("PLANTED" in note for note in record["notes"])
    on, off = record["measured"]
    # 8 requests at two loads and 4 of warm-up, in 5 processes; off runs as two arms
    assert (on["equality"]["answers"], on["equality"]["same_bits"], on["equality"]["most_distinct"]) == (100, 100, 1)
    assert off["equality"]["answers"] == 200
    assert off["equality"]["same_bits"] < 200  # the fake engine's ordinary mode depends on company
    assert off["loads"][0]["equality"]["same_bits"] == 80  # alone as in the reference


def test_the_parquet_tables_hold_every_answer_and_metric(tmp_path):
    record = measured(tmp_path / "c")
    answers = pq.ParquetFile(tmp_path / "c" / "requests.parquet").read(use_threads=False)
    assert answers.num_rows == record["design"]["processes"] * 2 * 8
    assert {"process", "round", "arm", "load", "request", "due_s", "token_s", "judged"} <= set(answers.column_names)
    metrics = pq.ParquetFile(tmp_path / "c" / "metrics.parquet").read(use_threads=False).to_pylist()
    seconds = [row["value"] for row in metrics if row["metric"] == "seconds" and row["load"] == "concurrency 4"]
    assert len(seconds) == record["design"]["processes"]
    assert not (tmp_path / "c" / "timings").exists()


def test_a_fast_arm_that_is_not_reproducible_is_a_failed_cost_cell(tmp_path):
    record = measured(tmp_path / "c", on=("invariant=false", "timer_us=500"), off=("invariant=true",))
    assert (record["state"], record["exit_code"], record["gate"]) == ("not reproducible", 1, {})
    assert "no cost of determinism" in record["outcome"]
    assert "Cost cell failed: not reproducible" in render_cost(record)


def test_a_fault_that_only_shows_under_load_is_found_in_the_timed_run(tmp_path):
    fault = ("fault=one-ulp", "fault_when=batched", f"fault_request={IDS[0]}~0")
    record = measured(tmp_path / "c", on=fault, off=("fault=none",), concurrency="4")
    assert record["state"] == "not reproducible"
    equality = record["measured"][0]["equality"]
    assert equality["same_tokens"] == equality["answers"] > equality["same_bits"]
    assert equality["first_different"] == (f"{IDS[0]} sample 0",)


def test_an_answer_from_a_cache_that_is_off_fails_the_cell():
    class Caching(ScriptedBench):
        def serve(self, load):
            return tuple(dataclasses.replace(one, cached_tokens=2) for one in super().serve(load))

    session = run_session(design(), arms(["timer_us=900"], ["timer_us=1000"]), scripted(still()), QUIET)
    assert compare(session).state is State.RESOLVED
    bench = Caching(arms().on, 1.0)
    trials = tuple(
        dataclasses.replace(trial, extra=bench.serve(closed_loop(IDS, 1, 1))) if trial.turn.arm == "on" else trial
        for trial in session.trials
    )
    found = compare(dataclasses.replace(session, trials=trials))
    assert found.state is State.NOT_COMPUTED
    assert "cache that is meant to be off" in found.sentence


def test_identical_arms_say_that_they_are(tmp_path):
    record = measured(tmp_path / "c", on=("deterministic",), off=("deterministic",))
    assert record["identical_arms"] is True
    assert record["state"] == "not resolved"
    assert any("whatever shows is noise" in note for note in record["notes"])


def test_every_turn_has_a_process_of_its_own_and_arms_alternate():
    opened = []
    session = run_session(design(), arms(), scripted(still(), opened), QUIET)
    timed = opened[len(arms().kinds()) :]
    assert len({name for _, name in opened}) == len(opened) == len(session.trials) + 2
    assert [trial.turn.arm for trial in session.trials][:6] == ["off", "on", "off again", "off again", "on", "off"]
    assert [arm for arm, _ in timed] == [session.arms.of(trial.turn.arm).name for trial in session.trials]
    assert all(len(trial.extra) == 4 for trial in session.trials)  # each warmed up by itself


def test_all_but_the_primary_metric_have_intervals_that_hold_together():
    """Every process and load has noise of its own, so that one metric's interval alone would be narrower."""
    rng = np.random.default_rng(5)

    class Noisy(ScriptedBench):
        def serve(self, load):
            self.factor = math.exp(rng.normal(0, 0.05))
            return super().serve(load)

    loads = (closed_loop(IDS, 1, 8), closed_loop(IDS, 4, 8))
    noisy_bench = lambda arm, _name: _entered(Noisy(arm, 1.0))  # noqa: E731
    session = run_session(design(loads=loads), arms(), noisy_bench, QUIET)
    found = compare(session)
    times = {arm: [[trial.serving(load.name).metrics["seconds"] for trial in session.of(arm)] for load in loads]
             for arm in ("on", "off", "off again")}  # fmt: skip
    by_load = [one for one in found.rest if one.metric.name == "seconds"]
    for arm, intervals in (("on", [one.effect for one in by_load]), ("off again", [one.identical for one in by_load])):
        rows = [[math.log(b / a) for a, b in zip(*pair, strict=True)]
                for pair in zip(times["off"], times[arm], strict=True)]  # fmt: skip
        assert [found.mean for found in intervals] == pytest.approx([np.mean(row) for row in rows])
        widths = [found.high - found.low for found in intervals]
        together = [found.high - found.low for found in simultaneous(rows)]
        alone = [found.high - found.low for found in map(interval, rows)]
        assert widths == pytest.approx(together)
        assert sum(widths) > 1.02 * sum(alone)
    assert found.primary.effect == interval([math.log(ratio) for ratio in found.primary.pairs])


def test_arms_that_change_between_processes_are_told():
    opened = itertools.count()

    def drifting(arm, _name):
        field = Field(name="kernels.digest", value=next(opened), field_class="identity", source="")
        bench = ScriptedBench(arm, 1.0, (field,))
        return _entered(bench)

    session = run_session(design(), arms(), drifting, QUIET)
    assert "arm on: kernels.digest was not the same in all of its processes" in session.drifted


def _entered(bench):
    import contextlib

    return contextlib.nullcontext(bench)


def test_differences_beyond_the_mode_are_listed():
    both = arms(["invariant=true"], ["invariant=false"])
    name = lambda value: Field(name="resolved.graphs", value=value, field_class="identity", source="")  # noqa: E731
    told = Field(name="resolved.invariant", value=True, field_class="identity", source="")
    context = Field(name="process.peak_memory_kib", value=1, field_class="context", source="")
    found = configuration_differences(ADAPTER, (both.on, both.off), ([name("off"), told], [name("on"), context]))
    assert [(one.name, one.on, one.off, one.owned) for one in found] == [("resolved.graphs", "off", "on", False)]


def test_what_explains_a_ratio_stands_beside_it(tmp_path):
    def opener(_subject):
        def open_bench(arm, _name):
            graphs = Field(name="resolved.graphs", value=arm.name, field_class="identity", source="")
            return _entered(ScriptedBench(arm, 1.0, (graphs,)))

        return open_bench

    record = measure(asked(tmp_path / "c", on=("threads=1",), off=("threads=2",)), QUIET, opener)[0]
    (found,) = record["differences"]
    assert (found["name"], found["on"], found["off"], found["owned"]) == ("resolved.graphs", "on", "off", False)
    for text in (cost_table(record, 120), render_cost(record)):
        assert "resolved.graphs: on on, off off" in text
        assert "eyond what was asked for" in text


def test_fields_that_the_engine_says_move_with_the_mode_are_marked():
    both = arms(["threads=1"], ["threads=2"])
    side = lambda value: [Field(name="env.OMP_NUM_THREADS", value=value, field_class="identity", source="")]  # noqa: E731
    (found,) = configuration_differences(ADAPTER, (both.on, both.off), (side("1"), side("2")))
    assert found.owned


def test_table_and_page_say_what_the_record_says(tmp_path):
    record = measured(tmp_path / "c", slowed=1.2, rates="20", shown=("free",), ttft_limit=0.5)
    text = cost_table(record, 100)
    for part in ("concurrency 1", "concurrency 4", "rate 20/s", "resolved", "reproducibility: ", "PLANTED",
                 "cache audit: ", "within the latency limits", record["outcome"].split(" (")[0]):  # fmt: skip
        assert part in re.sub(r"\s+", " ", text), part
    write_cost_report(record, tmp_path)
    page = (tmp_path / "cost.html").read_text()
    assert page.count("<svg") > 8
    assert "<script" not in page
    assert "nan" not in re.sub(r"<style.*?</style>", "", page, flags=re.DOTALL).lower().replace("nano", "")
    for part in ("Performance beside reproducibility", "Latency distributions", "PLANTED", "free: shown beside"):
        assert part in page


def test_what_was_not_measured_is_not_drawn_as_nothing(tmp_path):
    record = measured(tmp_path / "c", noise=still(), concurrency="2", on=("timer_us=1000",), off=("timer_us=1000",))
    assert "peak_device_bytes: no value in at least one process" in render_cost(record)
    assert record["primary"]["state"] == "same"


@pytest.mark.parametrize(("changes", "sentence"), [
    ({"pairs": 4}, "--pairs 4: expected at least 5"),
    ({"concurrency": "1,x"}, "--concurrency '1,x': expected whole numbers"),
    ({"concurrency": "4,4"}, "given twice"),
    ({"rates": "0"}, "--rate '0': expected numbers above 0"),
    ({"on": ("determinstic",)}, "did you mean 'deterministic'"),
    ({"on": ("timer_uss=3",)}, "--on timer_uss=3: engine 'fake' has no setting"),
    ({"slowed": 0.5}, "--plant-slowdown 0.5"),
    ({"corpus": "smok"}, "did you mean 'smoke'"),
])  # fmt: skip
def test_what_cannot_be_measured_is_refused_before_anything_starts(tmp_path, changes, sentence):
    opened = []
    with pytest.raises(UsageError, match=re.escape(sentence)):
        measure(asked(tmp_path / "c", **changes), QUIET, lambda _subject: scripted(still(), opened))
    assert opened == []


def test_an_earlier_measurement_is_not_overwritten_silently(tmp_path):
    measured(tmp_path / "c")
    with pytest.raises(UsageError, match="pass --overwrite"):
        measured(tmp_path / "c")
    measured(tmp_path / "c", overwrite=True)
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "mine.txt").write_text("x")
    with pytest.raises(UsageError, match="found other files"):
        measured(tmp_path / "d", overwrite=True)
    assert (tmp_path / "d" / "mine.txt").exists()


def test_loads_are_those_asked_for():
    found = make_design(asked(None, concurrency=None, rates="1,2.5", count=None), IDS)
    assert [(load.name, len(load.requests)) for load in found.loads] == [("rate 1/s", 32), ("rate 2.5/s", 32)]
    usual = make_design(asked(None, concurrency=None, count=None), IDS)
    assert [(load.name, len(load.requests)) for load in usual.loads] == [
        ("concurrency 1", 8), ("concurrency 4", 8), ("concurrency 16", 32),
    ]  # fmt: skip


def test_timings_that_were_changed_on_disk_are_refused(tmp_path):
    digest = write_timings(tmp_path / "t.parquet", [timing(), timing(computed_tokens=None)])
    assert read_timings(tmp_path / "t.parquet", digest) == (timing(), timing(computed_tokens=None))
    with pytest.raises(StoreError, match="not those that were written"):
        read_timings(tmp_path / "t.parquet", "0" * 64)


def test_an_engine_process_serves_by_the_clock_what_it_serves_alone(tmp_path):
    subject = Subject(adapter=ADAPTER, model="fake", requests=REQUESTS, folder=tmp_path, session="s", deadline_s=60.0)
    with open_processes(subject)(arms().on, "one") as bench:
        pid = bench._process.pid
        reference = bench.reference(IDS)
        found = bench.serve(closed_loop(IDS, 4, 9))
        assert bench.started.startup_s > 0
        assert bench.footprint().kv_capacity_tokens is None
    assert len(reference) == len(IDS)
    assert [one.request for one in found] == [*IDS, IDS[0]]
    assert all(one.judged == reference[one.key].judged for one in found)
    assert all(one.computed_tokens == one.prompt_tokens + len(one.token_s) - 1 for one in found)
    assert TIMER["timer_us"] == 1000
    assert found[0].token_s[0] > 0
    assert math.isclose(found[0].due_s, 0.0)
    with open_processes(subject)(arms().on, "two") as again:
        assert again._process.pid != pid


def documented():
    lines = [line.split("#")[0].split() for line in DOCS.read_text(encoding="utf-8").splitlines()]
    return [line[2:] for line in lines if line[:2] == ["samebits", "cost"] and "\\" not in line]


@pytest.mark.parametrize("line", documented(), ids=" ".join)
def test_documented_commands_name_arms_that_differ_and_settings_in_that_one_condition(line):
    options = cost_command.make_context("cost", [*line]).params
    adapter = registry.adapter(options["engine"])
    shared = parse_assignments(adapter, options["assignments"])
    both = choose_arms(adapter, options["on"], options["off"], (), shared)
    changed = {name for name, value in both.on.settings if dict(both.off.settings)[name] != value}
    assert changed
    if all("=" in word for word in (*options["on"], *options["off"])):  # not the names of modes
        assert len(changed) == 1
        assert changed == set(both.on.asked) & set(both.off.asked)
