"""Requests of random ids for tests of offline engines, and works made of them."""

import dataclasses
import random

import numpy as np

from harness.engine import Work
from harness.request import Request, Sampling
from harness.schedules import build_schedule

GREEDY = Sampling(
    temperature=0.0, top_p=1.0, top_k=0, min_p=0.0, repetition_penalty=1.0, frequency_penalty=0.0,
    presence_penalty=0.0, seed=None, max_tokens=6, min_tokens=0, ignore_eos=True, stop=(), stop_token_ids=(),
    logit_bias=(), logprobs=5, n=1,
)  # fmt: skip
LENGTHS = (37, 5, 90, 18)


def request(name, length, **changed):
    """A request of random ids of its own."""
    ids = random.Random(name).choices(range(32, 256), k=length)  # noqa: S311 - reproducible, not secret
    return Request(
        id=name, prompt_token_ids=tuple(ids), text=None, messages=None, grammar=None, images=(),
        sampling=dataclasses.replace(GREEDY, **changed),
    )  # fmt: skip


def requests(**changed):
    """Four of different lengths."""
    return tuple(request(f"r{i}", length, **changed) for i, length in enumerate(LENGTHS))


def work(those, schedule="together", golden=None, companions=(), digests=False):
    """One case. `schedule` is a builder's name."""
    judged = [one.id for one in those if one.id not in companions]
    built = build_schedule(schedule, judged, list(companions), cancelled=bool(companions))
    return Work(requests=tuple(those), schedule=built, replay="golden" if golden else "natural", golden=golden or {},
                logits_digests=digests)  # fmt: skip


def quiet(_requests, _tokens):
    """No progress."""


def paths(traces):
    """Request to its tokens."""
    ends = np.cumsum(traces.requests.length)
    return {
        name: tuple(traces.positions.token[end - length : end].tolist())
        for name, end, length in zip(traces.requests.id, ends, traces.requests.length, strict=True)
    }
