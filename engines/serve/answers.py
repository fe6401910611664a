"""The bodies of answers: one object, or a stream of chunks as server-sent events. It knows no routes.

Rules: a stream carries the same evidence as the whole answer, in order, for each choice; it ends with `[DONE]`; one
that cannot be finished says why in an `error` event first.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from engines.serve.errors import ApiError, error_body
from engines.serve.exchange import Exchange
from engines.serve.orders import Order
from engines.serve.pieces import Piece
from engines.serve.shapes import (
    Json,
    Prompt,
    chat_choice,
    chat_chunk,
    chat_opening,
    completion_choice,
    echoed,
    prompt_logprobs,
)

_WHOLE = {"completion": "text_completion", "chat": "chat.completion"}
_CHUNK = {"completion": "text_completion", "chat": "chat.completion.chunk"}
DONE = "data: [DONE]\n\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """What every answer of a server begins with."""

    model: str
    created: int  # seconds since 1970
    fingerprint: str  # the identity digest

    def fields(self, order: Order, kind: str) -> Json:
        """The keys before the choices; seeds are one per prompt."""
        return {
            "id": order.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": short_fingerprint(self.fingerprint),
            "samebits": {"seeds": list(order.seeds), "seed_source": order.seed_source},
        }


def short_fingerprint(digest: str) -> str:
    """`fp_` and the digest's first 16 hexadecimal digits."""
    return f"fp_{digest.removeprefix('sha256:')[:16]}"


def whole_answer(head: Head, exchange: Exchange, pieces: Sequence[Piece]) -> Json:
    """The answer to a request that does not stream."""
    order = exchange.order
    answer = head.fields(order, _WHOLE[order.api])
    prompts = [Prompt(*one) for one in zip(order.prompts, exchange.scores, strict=True)]
    if order.api == "completion":
        shown = zip(pieces, [prompt for prompt in prompts for _ in range(order.samples)], strict=True)
        answer["choices"] = [_whole_completion(i, one, order, prompt) for i, (one, prompt) in enumerate(shown)]
    else:
        answer["choices"] = [chat_choice(index, piece, order.shape) for index, piece in enumerate(pieces)]
        answer |= _chat_prompt(order)
        answer |= (
            {} if order.shape.prompt_top is None else {"prompt_logprobs": prompt_logprobs(prompts[0], order.shape)}
        )
    return answer | {"usage": usage(exchange, sum(len(piece.positions) for piece in pieces))}


def _whole_completion(index: int, piece: Piece, order: Order, prompt: Prompt) -> Json:
    choice = completion_choice(index, piece, order.shape, prompt.ids)
    if order.echo:
        choice |= echoed(piece, prompt, order.shape)
    if order.shape.prompt_top is not None:
        choice["prompt_logprobs"] = prompt_logprobs(prompt, order.shape)
    return choice


async def streamed_answer(head: Head, exchange: Exchange) -> AsyncIterator[str]:
    """The answer as server-sent events."""
    order, generated, begun = exchange.order, 0, set[int]()
    base = head.fields(order, _CHUNK[order.api]) | ({"usage": None} if order.include_usage else {})
    for event in _opening(order, base):
        yield event
    try:
        async for index, piece in exchange.pieces():
            yield _event(base | {"choices": [_chunk(order, index, piece, first=index not in begun)]})
            begun.add(index)
            generated += len(piece.positions)
    except ApiError as error:
        yield _event(error_body(error))
        yield DONE
        return
    if order.include_usage:
        yield _event(base | {"choices": [], "usage": usage(exchange, generated)})
    yield DONE


def usage(exchange: Exchange, generated: int) -> Json:
    """Tokens, each prompt counted once."""
    order = exchange.order
    return {
        "prompt_tokens": order.prompt_tokens,
        "completion_tokens": generated,
        "total_tokens": order.prompt_tokens + generated,
        "prompt_tokens_details": {"cached_tokens": exchange.cached_tokens},
    }


def _opening(order: Order, base: Json) -> list[str]:
    if order.api == "completion":
        return []
    chunks = [base | {"choices": [chat_opening(index)]} for index in range(len(order.requests))]
    chunks[0] |= _chat_prompt(order)
    return [_event(chunk) for chunk in chunks]


def _chunk(order: Order, index: int, piece: Piece, *, first: bool) -> Json:
    if order.api == "chat":
        return chat_chunk(index, piece, order.shape)
    prompt = order.prompts[index // order.samples] if first else None
    return completion_choice(index, piece, order.shape, prompt)


def _chat_prompt(order: Order) -> Json:
    return {"prompt_token_ids": list(order.prompts[0])} if order.shape.token_ids else {}


def _event(value: Json) -> str:
    return f"data: {json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(',', ':'))}\n\n"
