"""What the tests of cost are made of: timings, and benches with a scripted clock and scripted noise."""

import dataclasses
import math
from contextlib import contextmanager
from functools import cache

from engines.fake import FakeAdapter
from harness.corpus import load_corpus, retokenise
from harness.cost.arm import choose_arms
from harness.cost.audit import Answer, reference_key
from harness.cost.bench import Started
from harness.cost.drive import drive
from harness.cost.load import closed_loop, copies
from harness.cost.serve import timings_of, tokens_only
from harness.cost.session import Design
from harness.cost.timing import Timing
from harness.digest import judged_keys, request_digests
from harness.engine import Field, Footprint, Work
from harness.schedules import build_schedule

ADAPTER = FakeAdapter()
REQUESTS = retokenise(load_corpus("smoke"), ADAPTER.tokenizer("fake")).requests
IDS = tuple(request.id for request in REQUESTS)
TIMER = {"timer_us": 1000}


def timing(request="a", **changes):
    """One answer of four tokens, 10 ms apart."""
    values = {
        "request": request, "copy": 0, "sample": 0, "prompt_tokens": 8, "cached_tokens": 0, "computed_tokens": 11,
        "preemptions": 0, "due_s": 0.0, "submitted_s": 0.0, "finish_s": 0.05, "token_s": (0.02, 0.03, 0.04, 0.05),
        "judged": "x" * 64, "tokens_only": "y" * 64,
    }  # fmt: skip
    return Timing(**{**values, **changes})


def answer(judged="x", tokens="y"):
    """A reference's answer."""
    return Answer(judged=judged * 64, tokens_only=tokens * 64)


def arms(on=(), off=(), slowed=1.0, shared=TIMER):
    """Arms of the fake engine on its scripted clock."""
    return choose_arms(ADAPTER, on, off, (), shared, slowed)


def design(pairs=5, loads=None, limits=None):
    """A session over the smoke corpus."""
    loads = loads if loads is not None else (closed_loop(IDS, 4, 8),)
    return Design(loads=loads, pairs=pairs, limits=limits, seed=0, ids=IDS)


@cache
def served(settings, load):
    """What the fake engine does with a load, on the scripted clock."""
    engine = ADAPTER.start("fake", dict(settings))
    timed = copies(load, REQUESTS)
    session = engine.open_timed(timed)
    clocked = drive(session, load, timed)
    return timings_of(clocked, session.finish())


@cache
def alone(settings, ids):
    """The untimed reference."""
    engine = ADAPTER.start("fake", dict(settings))
    requests = tuple(request for request in REQUESTS if request.id in ids)
    work = Work(
        requests=requests, schedule=build_schedule("alone", ids), replay="natural", golden={}, logits_digests=False
    )
    traces = engine.generate(work, lambda _requests, _tokens: None)
    tokens = tokens_only(traces)
    digests = zip(judged_keys(traces), request_digests(traces), strict=True)
    return {reference_key(*key): Answer(judged=judged, tokens_only=tokens[key]) for key, judged in digests}


def scaled(one, factor):
    """A timing on a clock that runs `factor` times as long."""
    return dataclasses.replace(
        one, due_s=one.due_s * factor, submitted_s=one.submitted_s * factor, finish_s=one.finish_s * factor,
        token_s=tuple(time * factor for time in one.token_s),
    )  # fmt: skip


class ScriptedBench:
    """The fake engine's deterministic times, all of them multiplied by one factor of this process."""

    def __init__(self, arm, factor, fields=()):
        self.arm, self.factor = arm, factor * arm.slowed
        resolved = dict(arm.settings)
        named = [Field(name=f"resolved.{k}", value=v, field_class="identity", source="") for k, v in resolved.items()]
        self.started = Started(startup_s=0.5 * factor, resolved=resolved, fields=(*named, *fields))

    def serve(self, load):
        return tuple(scaled(one, self.factor) for one in served(self.arm.settings, load))

    def footprint(self):
        return Footprint(peak_memory_bytes=int(1e8 * self.factor), peak_device_bytes=None, kv_capacity_tokens=4096)

    def reference(self, ids):
        return alone(self.arm.settings, tuple(ids))


def scripted(noise, opened=None):
    """Opens benches one after another; `noise` yields the log of each one's factor."""

    @contextmanager
    def open_bench(arm, name):
        if opened is not None:
            opened.append((arm.name, name))
        yield ScriptedBench(arm, math.exp(0.0 if name.startswith("reference") else next(noise)))

    return open_bench
