"""Preludes: what an engine is made to serve before a case, so that its caches and history are not empty.

It does not know engines or plans. Rules: a prelude is built from requests alone, deterministically; its requests carry
ids of their own and are never judged; each generates one token, since what matters is what it leaves behind.

The kinds, over the judged requests:

    warm       the same prompts: every page of every prompt may come from a cache
    partial    the first half of each prompt, so that only a part of it can
    foreign    the first third of each prompt continued by the prompt of another request: a shorter prefix, left behind
               by somebody else
    restored   as warm, but served by another engine process, whose cache was written to disk and read from there
    CORPUS:N   the first N requests of another corpus, whole: history without a common prefix
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from harness.request import Request

RESTORED = "restored"
KINDS = ("warm", "partial", "foreign", RESTORED)


def build_prelude(kind: str, requests: Sequence[Request], other: Sequence[Request]) -> tuple[Request, ...]:
    """The prelude's requests. `other` is what CORPUS:N names; it is ignored by the other kinds."""
    if kind in _BUILDERS:
        return tuple(
            _named(request, _BUILDERS[kind](request, requests[(index + 1) % len(requests)]), 1)
            for index, request in enumerate(requests)
        )
    return tuple(_named(request, request.prompt_token_ids, request.sampling.max_tokens) for request in other)


def prelude_id(request: str) -> str:
    """The id of a prelude's request: it must not collide with a judged one's."""
    return f"prelude:{request}"


def _named(request: Request, prompt: tuple[int, ...], max_tokens: int) -> Request:
    sampling = dataclasses.replace(request.sampling, max_tokens=max_tokens, min_tokens=0)
    return dataclasses.replace(
        request, id=prelude_id(request.id), prompt_token_ids=prompt, text=None, messages=None, sampling=sampling
    )


def _warm(request: Request, _: Request) -> tuple[int, ...]:
    return request.prompt_token_ids


def _partial(request: Request, _: Request) -> tuple[int, ...]:
    prompt = request.prompt_token_ids
    return prompt[: max(1, len(prompt) // 2)]


def _foreign(request: Request, next_one: Request) -> tuple[int, ...]:
    prompt = request.prompt_token_ids
    return prompt[: max(1, len(prompt) // 3)] + next_one.prompt_token_ids


_BUILDERS: dict[str, Callable[[Request, Request], tuple[int, ...]]] = {
    "warm": _warm,
    RESTORED: _warm,
    "partial": _partial,
    "foreign": _foreign,
}
