"""A soak counts drift over time, with load and against a new server; quantiles only of enough values."""

import json
from dataclasses import replace

import pytest
from click.testing import CliRunner

from harness.cli import commands
from harness.soak.measure import Soak, SoakRound, quantile


def rounds(digests, backgrounds="abab", kib=None):
    return tuple(
        SoakRound(background=name, digest=digest, at_s=float(at), seconds=1.0, resident_kib=kib[at] if kib else None,
                  ttft_s=(0.1,) * 4, e2e_s=(1.0,) * 4, occupancy=None)
        for at, (digest, name) in enumerate(zip(digests, backgrounds, strict=True))
    )  # fmt: skip


def test_a_quiet_soak_is_clean():
    soak = Soak(old=rounds("xxxx"), new=rounds("xx", "ab"))
    assert (soak.drifted, soak.distinct, soak.renewed, soak.exit_code) == ((), 1, (), 0)


@pytest.mark.parametrize(("old", "new", "drifted", "distinct", "renewed"), [
    ("xxyx", "xx", (2,), 1, ()), ("xyxy", "xy", (), 2, ()), ("xxxx", "xz", (), 1, (1,)),
])  # fmt: skip
def test_each_kind_of_drift_is_told_apart(old, new, drifted, distinct, renewed):
    soak = Soak(old=rounds(old), new=rounds(new, "ab"))
    assert (soak.drifted, soak.distinct, soak.renewed) == (drifted, distinct, renewed)
    assert soak.exit_code == 1


def test_growth_is_counted_over_the_second_half():
    soak = Soak(old=rounds("x" * 8, "abcdabcd", kib=[10, 50, 60, 70, 100, 104, 108, 112]), new=rounds("xx", "ab"))
    assert soak.growth_kib == 12
    assert soak.to_json()["growth_kib_per_round"] == pytest.approx(4.0)
    assert "growth in its second half 12 KiB" in soak.sentence
    assert Soak(old=rounds("xxxx"), new=rounds("xx", "ab")).growth_kib is None


def test_a_quantile_is_a_measured_value_and_none_of_too_few():
    assert quantile(list(range(1, 1001)), 0.99) == 990
    assert quantile(list(range(999)), 0.99) is None
    assert quantile([3.0], 0.5) == 3.0
    assert quantile([], 0.5) is None


def test_latencies_compare_the_last_rounds_with_a_new_server():
    old = rounds("xxxx")
    slow = tuple(replace(one, e2e_s=(3.0,) * 4) for one in old[2:])
    found = Soak(old=(*old[:2], *slow), new=rounds("xx", "ab")).latencies()
    assert found["e2e_p50"] == {"old_s": 3.0, "new_s": 1.0, "ratio": 3.0}
    assert found["e2e_p99"]["ratio"] is None
    few = Soak(old=old, new=rounds("xx", "ab"))
    assert "p99 needs 1,000 answers of the new server after its first round, there are 4" in few.text()
    crowd = tuple(replace(one, ttft_s=(0.1,) * 1000, e2e_s=(2.0,) * 989 + (5.0,) * 11) for one in old)
    enough = Soak(old=crowd, new=tuple(replace(one, e2e_s=(2.5,) * 1000) for one in crowd[:2]))
    assert enough.latencies()["e2e_p99"] == {"old_s": 5.0, "new_s": 2.5, "ratio": 2.0}
    assert "p99 needs" not in enough.text()


@pytest.mark.parametrize(("settings", "code"), [((), 0), (("--set", "fault=noise"), 1)])
def test_the_command_is_bounded_and_finds_an_engine_that_drifts(tmp_path, settings, code):
    options = ["soak", "smoke", "--engine", "fake", "--load", "bursts", "--rounds", "6", "--quiet"]
    options += [*settings, "--out", str(tmp_path / "out")]
    result = CliRunner().invoke(commands, options, standalone_mode=False)
    assert result.return_value == code, result.output
    record = json.loads((tmp_path / "out" / "soak.json").read_text())
    assert [one["background"] for one in record["old"]] == [f"bursts:{at}" for at in (1, 2, 3, 4, 1, 2)]
    assert len(record["new"]) == 4
    assert max(map(int, record["old"][0]["occupancy"]["running"])) == 8  # every seat
    assert all(one["resident_kib"] > 0 for one in record["old"])
    assert not any((tmp_path / "out" / "captures").iterdir())
