"""An order: everything one HTTP request asks for, checked and in the engine's terms. Nothing runs here.

It does not know HTTP or the engine's thread. Rules: what the engine would refuse is refused here, by the field's
name; each prompt of a list is served as if it had come alone; sample i of a prompt is the engine's sample i.
"""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from engines.bundled.config import EngineConfig, ModelConfig
from engines.bundled.errors import ModelError, RequestError
from engines.bundled.grammar import Grammars
from engines.bundled.request import Grammar, Request, Sampling, check_request
from engines.bundled.tokenizer import Tokenizer
from engines.serve.errors import ApiError, refuse
from engines.serve.parameters import (
    Room,
    Wanted,
    build_sampling,
    chat_limit,
    chat_wanted,
    check_prompt,
    completion_limit,
    completion_wanted,
)
from engines.serve.pieces import Names
from engines.serve.protocol import ChatBody, CompletionBody, SamplingBody
from engines.serve.seeds import Seeding, SeedSource
from engines.serve.shapes import Shape
from engines.serve.structured import read_structured

Api = Literal["completion", "chat"]
MOST_SEQUENCES = 1024  # prompts times choices of one request


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Kitchen:
    """What orders are checked against."""

    model_name: str
    model: ModelConfig
    engine: EngineConfig
    tokenizer: Tokenizer
    seeding: Seeding
    grammars: Grammars | None

    @property
    def room(self) -> Room:
        """What one request may come to."""
        return Room.of(self.model, self.engine)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Order:
    """One HTTP request. `requests` holds the n samples of the first prompt, then those of the second, and so on.

    `scores` are requests that follow the prompts themselves, so that their log-probabilities become known: one per
    prompt of several tokens, in the order of the prompts, or none at all.
    """

    api: Api
    id: str
    prompts: tuple[tuple[int, ...], ...]
    requests: tuple[Request, ...]
    scores: tuple[Request, ...]
    seeds: tuple[int | None, ...]  # one per prompt
    seed_source: SeedSource
    shape: Shape
    keep_stop: bool
    stream: bool
    include_usage: bool
    echo: bool  # the prompt stands before each choice

    @property
    def samples(self) -> int:
        """Choices per prompt."""
        return len(self.requests) // len(self.prompts)

    @property
    def prompt_tokens(self) -> int:
        """Prompt tokens, each prompt once."""
        return sum(map(len, self.prompts))


def order_completion(body: CompletionBody, kitchen: Kitchen) -> Order:
    """Raises ApiError. Tokenises text, which may take a while: call it off the event loop."""
    _check_model(body, kitchen)
    if body.echo and body.stream:
        refuse("echo", "stream to be false beside it", True)
    prompts = _completion_prompts(body, kitchen.tokenizer)
    return _order("completion", body, prompts, "prompt", completion_wanted(body), completion_limit(body), kitchen)


def order_chat(body: ChatBody, kitchen: Kitchen) -> Order:
    """Raises ApiError. Renders and tokenises the messages: call it off the event loop."""
    _check_model(body, kitchen)
    try:
        prompt = kitchen.tokenizer.encode_chat([(message.role, message.text) for message in body.messages])
    except ModelError as error:
        raise ApiError(400, f"messages: {error}", "messages") from error
    return _order("chat", body, (prompt,), "messages", chat_wanted(body), chat_limit(body), kitchen)


def _check_model(body: SamplingBody, kitchen: Kitchen) -> None:
    if body.model != kitchen.model_name:
        message = f"model: {body.model!r} is not served here; {kitchen.model_name!r} is"
        raise ApiError(404, message, "model", "model_not_found")
    if body.prompt_logprobs is not None and body.stream:
        refuse("prompt_logprobs", "stream to be false beside it", body.prompt_logprobs)


def _completion_prompts(body: CompletionBody, tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    prompt = body.prompt
    if isinstance(prompt, str):
        return (tokenizer.encode(prompt),)
    if not prompt:
        refuse("prompt", "at least one token or prompt", prompt)
    if isinstance(prompt[0], int):
        return (tuple(token for token in prompt if isinstance(token, int)),)
    return tuple(tokenizer.encode(one) if isinstance(one, str) else _ids(one) for one in prompt)


def _ids(one: int | list[int]) -> tuple[int, ...]:
    return (one,) if isinstance(one, int) else tuple(one)


def _order(
    api: Api,
    body: SamplingBody,
    prompts: tuple[tuple[int, ...], ...],
    field: str,
    wanted: Wanted,
    limit: int | None,
    kitchen: Kitchen,
) -> Order:
    room, samples = kitchen.room, body.n or 1
    if len(prompts) * samples > MOST_SEQUENCES:
        refuse("n", f"at most {MOST_SEQUENCES} choices over all prompts", len(prompts) * samples)
    for index, prompt in enumerate(prompts):
        check_prompt(prompt, field if len(prompts) == 1 else f"{field}[{index}]", room)
    grammar = read_structured(body, kitchen.grammars)
    settled = [
        kitchen.seeding.settle(prompt, build_sampling(body, wanted, limit, len(prompt), room), grammar)
        for prompt in prompts
    ]
    _check_candidates(settled[0][0], kitchen.model)
    echo = isinstance(body, CompletionBody) and bool(body.echo)
    scored = body.prompt_logprobs if not (echo and wanted.logprobs) else max(wanted.top, body.prompt_logprobs or 0)
    name = f"{'cmpl' if api == 'completion' else 'chatcmpl'}-{uuid.uuid4().hex}"
    return Order(
        api=api,
        id=name,
        prompts=prompts,
        requests=_placed(
            body, _requests(name, prompts, [sampling for sampling, _ in settled], grammar, samples, kitchen), kitchen
        ),
        scores=_scores(name, prompts, settled[0][0], scored),
        seeds=tuple(sampling.seed for sampling, _ in settled),
        seed_source=settled[0][1],
        shape=Shape(
            wanted, Names(kitchen.tokenizer.decode, as_ids=bool(body.return_tokens_as_token_ids)),
            bool(body.return_token_ids), body.prompt_logprobs,
        ),
        keep_stop=bool(body.include_stop_str_in_output),
        stream=bool(body.stream),
        include_usage=body.stream_options is not None and bool(body.stream_options.include_usage),
        echo=echo,
    )  # fmt: skip


def _check_candidates(sampling: Sampling, model: ModelConfig) -> None:
    """min_tokens masks what may end a request; if that is every token, none is left to take."""
    ends = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else model.eos_token_ids)}
    if sampling.min_tokens and len(ends) >= model.vocab_size:
        refuse("stop_token_ids", "at least one token left to generate before min_tokens", f"{len(ends)} ids")


def _requests(
    name: str,
    prompts: Sequence[tuple[int, ...]],
    samplings: Sequence[Sampling],
    grammar: Grammar | None,
    samples: int,
    kitchen: Kitchen,
) -> tuple[Request, ...]:
    requests = [
        Request(id=f"{name}/{index}", prompt=prompt, sampling=sampling, grammar=grammar, sample=sample)
        for index, (prompt, sampling) in enumerate(zip(prompts, samplings, strict=True))
        for sample in range(samples)
    ]
    for request in requests[::samples]:
        try:
            check_request(request, kitchen.model, kitchen.engine)
        except RequestError as error:  # a bound of the engine that no field's check above knows
            raise ApiError(400, str(error)) from error
    return tuple(requests)


def _placed(body: SamplingBody, requests: tuple[Request, ...], kitchen: Kitchen) -> tuple[Request, ...]:
    """With their place in line and their way of decoding. A wish that this server cannot grant is refused."""
    if body.priority and kitchen.engine.policy != "priority":
        refuse("priority", "0, or a server that was started with policy=priority", body.priority)
    if body.rollback and kitchen.engine.rollback == "off":
        refuse("rollback", "false, or a server that was started with rollback=request", body.rollback)
    return tuple(
        dataclasses.replace(request, priority=body.priority or 0, rollback=bool(body.rollback)) for request in requests
    )


def _scores(name: str, prompts: Sequence[tuple[int, ...]], sampling: Sampling, top: int | None) -> tuple[Request, ...]:
    """Requests that are forced along the prompts and report `top` candidates; none where nobody asked (None)."""
    if top is None:
        return ()
    greedy = dataclasses.replace(
        sampling, temperature=0.0, seed=None, min_tokens=0, ignore_eos=True, stop=(), stop_token_ids=(), logit_bias=(),
        repetition_penalty=1.0, frequency_penalty=0.0, presence_penalty=0.0, logprobs=top,
    )  # fmt: skip
    return tuple(
        Request(
            id=f"{name}/{index}/prompt",
            prompt=prompt[:1],
            sampling=dataclasses.replace(greedy, max_tokens=len(prompt) - 1),
            forced=prompt[1:],
            scored=True,
        )
        for index, prompt in enumerate(prompts)
        if len(prompt) > 1
    )
