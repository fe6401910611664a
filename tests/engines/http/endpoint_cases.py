"""Endpoints, requests and works for tests: an adapter's engine against a scripted server, in this process."""

from __future__ import annotations

import contextlib
import dataclasses

from engines.http.adapter import EndpointAdapter
from harness.engine import Work
from harness.request import Request, Sampling
from harness.schedules import build_schedule

SETTINGS = {setting.name: setting.default for setting in EndpointAdapter().settings()}
GREEDY = Sampling(
    temperature=0.0, top_p=1.0, top_k=0, min_p=0.0, repetition_penalty=1.0, frequency_penalty=0.0,
    presence_penalty=0.0, seed=None, max_tokens=6, min_tokens=0, ignore_eos=True, stop=(), stop_token_ids=(),
    logit_bias=(), logprobs=3, n=1,
)  # fmt: skip


def request(name="a", ids=(1, 2, 3), **sampling):
    """One request, greedy unless said otherwise."""
    return Request(
        id=name, prompt_token_ids=tuple(ids), text=None, messages=None,
        sampling=dataclasses.replace(GREEDY, **sampling), grammar=None, images=(),
    )  # fmt: skip


def work(*requests, schedule="alone", **changes):
    """The requests under a named schedule."""
    requests = requests or (request(),)
    plan = build_schedule(schedule, [one.id for one in requests])
    made = Work(requests=tuple(requests), schedule=plan, replay="natural", golden={}, logits_digests=False)
    return dataclasses.replace(made, **changes)


def ignore(requests, tokens):
    """Progress that nobody watches."""


@contextlib.contextmanager
def endpoint(url, model="tiny", **settings):
    """A started engine; stopped when the block ends."""
    engine = EndpointAdapter().start(model, {**SETTINGS, "url": url, "flavour": "vllm", **settings})
    try:
        yield engine
    finally:
        engine.stop()


def generate(engine, *requests, **options):
    """Runs one work."""
    return engine.generate(work(*requests, **options), ignore)
