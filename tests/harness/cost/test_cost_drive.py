"""The driver: when requests are handed over, and that no stall is forgotten."""

import pytest
from cost_making import ADAPTER, IDS, REQUESTS, TIMER, served
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.cost.drive import drive
from harness.cost.load import Load, closed_loop, copies, cycle, load_from_json, load_json, original, poisson, read_trace
from harness.cost.serve import timings_of
from harness.engine import Emission
from harness.errors import EngineError, UsageError


class Scripted:
    """A session that takes a second per token of one request at a time, and stalls on demand."""

    def __init__(self, tokens=2, stall=None):
        self.clock, self.tokens, self.stall = 0.0, tokens, stall
        self.line, self.most, self.handed = [], 0, {}

    def now(self):
        return self.clock

    def submit(self, request):
        self.handed[request] = self.clock
        self.line.append([request, 0])
        self.most = max(self.most, len(self.line))

    def advance(self, until_s):
        if not self.line:
            self.clock = max(self.clock, until_s)
            return []
        self.clock += self.stall.pop(0) if self.stall else 1.0
        head = self.line[0]
        head[1] += 1
        if head[1] == self.tokens:
            self.line.pop(0)
        return [Emission(request=head[0], sample=0, tokens=1, finished=head[1] == self.tokens, at_s=self.clock)]


def open_load(*due):
    return Load(name="x", kind="trace", concurrency=None, rate=None, requests=cycle(IDS, len(due)), due_s=due)


def timed(load):
    return copies(load, REQUESTS)


def test_a_stall_delays_every_request_that_was_due_meanwhile():
    """No coordinated omission: what was due during the stall has waited since then, not since it was handed over."""
    load = open_load(0.0, 2.0, 4.0)
    first, second, third = drive(Scripted(tokens=1, stall=[10.0]), load, timed(load))
    assert [one.due_s for one in (first, second, third)] == [0.0, 2.0, 4.0]
    assert [one.submitted_s for one in (second, third)] == [10.0, 10.0]
    assert [one.token_s[0] - one.due_s for one in (first, second, third)] == [10.0, 9.0, 8.0]


def test_arrivals_of_an_open_loop_wait_for_no_answer():
    session = Scripted(tokens=3)
    load = open_load(0.0, 0.5, 1.0, 1.5)
    drive(session, load, timed(load))
    assert session.most > 2
    assert all(handed <= due + 1.0 for handed, due in zip(session.handed.values(), load.due_s, strict=True))


@pytest.mark.parametrize("concurrency", [1, 3])
def test_a_closed_loop_keeps_its_seats_full_and_no_more(concurrency):
    session = Scripted()
    load = closed_loop(IDS, concurrency, 7)
    found = drive(session, load, timed(load))
    assert session.most == concurrency
    assert len(found) == 7
    assert all(one.due_s == one.submitted_s for one in found)


def test_an_idle_gap_is_slept_through():
    load = open_load(0.0, 50.0)
    _, late = drive(Scripted(tokens=1), load, timed(load))
    assert late.submitted_s == 50.0


@pytest.mark.parametrize("emission", [
    Emission(request="stranger~0", sample=0, tokens=1, finished=True, at_s=1.0),
    Emission(request=f"{IDS[0]}~0", sample=7, tokens=1, finished=True, at_s=1.0),
])  # fmt: skip
def test_tokens_that_nobody_asked_for_are_an_error(emission):
    session = Scripted()
    session.advance = lambda _until: [emission]
    load = open_load(0.0)
    with pytest.raises(EngineError, match="not submitted or is over"):
        drive(session, load, timed(load))


def test_on_the_scripted_clock_times_are_known_numbers():
    """Four tokens of overhead a step: a prompt of n takes n + 4 milliseconds to its first token, then 5 each."""
    load = closed_loop(IDS, 1, 2)
    first = served(tuple(TIMER.items()), load)[0]
    assert first.token_s[0] - first.due_s == pytest.approx((first.prompt_tokens + 4) / 1000)
    assert first.token_s[1] - first.token_s[0] == pytest.approx(0.005)


def test_a_clock_and_tables_that_disagree_are_an_error():
    load = closed_loop(IDS, 2, 3)
    requests = timed(load)
    session = ADAPTER.start("fake", TIMER).open_timed(requests)
    clocked = drive(session, load, requests)
    traces = session.finish()
    assert len(timings_of(clocked, traces)) == 3
    clocked[1].token_s.pop()
    with pytest.raises(EngineError, match="tokens came and the engine's tables hold"):
        timings_of(clocked, traces)
    with pytest.raises(EngineError, match="do not hold the same"):
        timings_of(clocked[:2], traces)


def test_copies_have_ids_of_their_own_and_lead_back():
    load = closed_loop(IDS, 4, 2 * len(IDS) + 1)
    assert len(set(load.timed_ids)) == len(load.requests)
    assert [original(name)[0] for name in load.timed_ids] == list(load.requests)
    assert original(load.timed_ids[-1]) == (IDS[0], 2)
    assert load_from_json(load_json(load)) == load


@settings(deadline=None)
@given(st.floats(0.1, 100), st.integers(1, 50))
def test_rates_differ_in_nothing_but_scale(rate, count):
    one, other = poisson(IDS, rate, count, 5), poisson(IDS, 2 * rate, count, 5)
    assert one.requests == other.requests
    assert one.due_s == pytest.approx([2 * due for due in other.due_s])
    assert list(one.due_s) == sorted(one.due_s)


def test_a_trace_is_replayed_as_recorded(tmp_path):
    file = tmp_path / "t.jsonl"
    file.write_text(f'{{"at_s": 0}}\n{{"at_s": 0.5, "request": "{IDS[3]}"}}\n\n{{"at_s": 0.5}}\n')
    load = read_trace(file, IDS)
    assert load.due_s == (0.0, 0.5, 0.5)
    assert load.requests == (IDS[0], IDS[3], IDS[2])


def test_every_mistake_of_a_trace_is_told_with_its_line(tmp_path):
    file = tmp_path / "t.jsonl"
    file.write_text(
        '{"at_s": 2}\n{"at_s": 1}\n{"at_s": -1}\n{"at": 1}\nx\n{"at_s": 3, "request": "nobody"}\n{"at_s": true}\n'
    )
    with pytest.raises(UsageError) as error:
        read_trace(file, IDS)
    text = str(error.value)
    for part in ("line 2: at_s 1 is before 2", "line 3: at_s", "line 4: unknown key 'at'", "line 5: expected a JSON",
                 "line 6: request 'nobody'", "line 7: at_s"):  # fmt: skip
        assert part in text
    file.write_text("\n")
    with pytest.raises(UsageError, match="no arrivals"):
        read_trace(file, IDS)
