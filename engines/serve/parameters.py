"""From a body to the engine's sampling parameters, with every bound that depends on the model checked by name.

It does not know HTTP or seeds' policy. Rules: defaults are OpenAI's; nothing is bent to fit: what cannot run as
written is refused with the field that is to blame.
"""

from __future__ import annotations

from typing import NamedTuple, TypeVar

from engines.bundled.config import EngineConfig, ModelConfig
from engines.bundled.request import LEAST_TEMPERATURE, Sampling
from engines.serve.errors import ApiError, refuse
from engines.serve.protocol import ChatBody, CompletionBody, SamplingBody

DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's default of max_tokens for completions
TOO_LONG = "context_length_exceeded"
T = TypeVar("T")


class Room(NamedTuple):
    """What a model and its page pool hold of one request, in tokens."""

    vocabulary: int
    context: int
    most: int  # prompt and output together: the context, or less where the whole pool is smaller

    @classmethod
    def of(cls, model: ModelConfig, engine: EngineConfig) -> Room:
        """The last token's keys and values are never needed, so the pool holds one token more than its pages."""
        context = model.max_position_embeddings
        return cls(model.vocab_size, context, min(context, engine.num_pages * engine.page_size + 1))


class Wanted(NamedTuple):
    """Which log-probabilities a request asked for."""

    logprobs: bool
    top: int  # candidates per position


def completion_wanted(body: CompletionBody) -> Wanted:
    """`logprobs: k`; null is none, 0 the chosen token's alone."""
    return Wanted(body.logprobs is not None, body.logprobs or 0)


def chat_wanted(body: ChatBody) -> Wanted:
    """`logprobs: true, top_logprobs: k`. Raises ApiError for k without logprobs."""
    if body.top_logprobs is not None and not body.logprobs:
        refuse("top_logprobs", "logprobs to be true beside it", body.top_logprobs)
    return Wanted(bool(body.logprobs), body.top_logprobs or 0)


def completion_limit(body: CompletionBody) -> int:
    """The most tokens to generate."""
    return DEFAULT_COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens


def chat_limit(body: ChatBody) -> int | None:
    """The most tokens to generate; None is as many as there is room for. Raises ApiError for two different ones."""
    if body.max_tokens is not None and body.max_completion_tokens not in (None, body.max_tokens):
        refuse("max_tokens", "one of max_tokens and max_completion_tokens, or both equal", body.max_tokens)
    return body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens


def check_prompt(ids: tuple[int, ...], field: str, room: Room) -> None:
    """Raises ApiError for a prompt that is empty, too long, or of ids that do not exist."""
    if not ids:
        refuse(field, "at least one token", "none")
    bad = next((token for token in ids if not 0 <= token < room.vocabulary), None)
    if bad is not None:
        refuse(field, f"token ids below {room.vocabulary}", bad)
    if len(ids) >= room.most:
        limit = f"the context of {room.context}" if room.most == room.context else f"the KV pages' {room.most}"
        message = f"{field}: {len(ids)} tokens leave no room to answer within {limit} tokens; shorten the prompt"
        raise ApiError(400, message, field, TOO_LONG)


def build_sampling(body: SamplingBody, wanted: Wanted, limit: int | None, prompt: int, room: Room) -> Sampling:
    """The engine's parameters for a prompt of `prompt` tokens, the seed as sent. Raises ApiError."""
    _check_stream_options(body)
    _check_temperature(body.temperature)
    most = room.most - prompt if limit is None else limit
    if prompt + most > room.most:
        message = (
            f"max_tokens: prompt of {prompt} and output of {most} tokens exceed the {room.most} that one request "
            "can have here"
        )
        raise ApiError(400, message, "max_tokens", TOO_LONG)
    least = body.min_tokens or 0
    if least > most:
        refuse("min_tokens", f"at most max_tokens, which is {most}", least)
    return Sampling(
        temperature=_or(body.temperature, 1.0),
        top_p=_or(body.top_p, 1.0),
        top_k=max(0, _or(body.top_k, 0)),
        min_p=_or(body.min_p, 0.0),
        repetition_penalty=_or(body.repetition_penalty, 1.0),
        frequency_penalty=_or(body.frequency_penalty, 0.0),
        presence_penalty=_or(body.presence_penalty, 0.0),
        seed=body.seed,
        max_tokens=most,
        min_tokens=least,
        ignore_eos=bool(body.ignore_eos),
        stop=_stops(body.stop),
        stop_token_ids=_ids("stop_token_ids", body.stop_token_ids or [], room),
        logit_bias=_bias(body.logit_bias or {}, room),
        logprobs=wanted.top,
    )


def _or(value: T | None, default: T) -> T:
    return default if value is None else value


def _check_stream_options(body: SamplingBody) -> None:
    if body.stream_options is not None and not body.stream:
        refuse("stream_options", "stream to be true beside it", body.stream)


def _check_temperature(temperature: float | None) -> None:
    if temperature is not None and 0 < temperature < LEAST_TEMPERATURE:
        refuse("temperature", f"0, or at least {LEAST_TEMPERATURE}", temperature)


def _stops(stop: str | list[str] | None) -> tuple[str, ...]:
    if stop is None:
        return ()
    return (stop,) if isinstance(stop, str) else tuple(stop)


def _ids(field: str, ids: list[int], room: Room) -> tuple[int, ...]:
    for index, token in enumerate(ids):
        if token >= room.vocabulary:
            refuse(f"{field}[{index}]", f"a token id below {room.vocabulary}", token)
    return tuple(ids)


def _bias(bias: dict[str, float], room: Room) -> tuple[tuple[int, float], ...]:
    pairs = sorted((int(key), value) for key, value in bias.items())
    _ids("logit_bias", [token for token, _ in pairs], room)
    return tuple(pairs)
