"""A corpus for another model: prompts encoded again, and a check that they fit.

It does not know models beyond their tokenizer and two numbers. Rules: a corpus whose tokenizer is the
model's own is left as it is; text and messages are encoded again; ids are folded into the vocabulary only
where the corpus declares that they carry no meaning; everything else is an error that names the request.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from harness.corpus.manifest import TokenizerName
from harness.corpus.view import with_requests
from harness.engine import Tokenizer
from harness.errors import ModelError
from harness.request import Request, Sampling
from harness.strict_json import raise_mistakes

if TYPE_CHECKING:
    from harness.corpus import Corpus


def retokenise(corpus: Corpus, tokenizer: Tokenizer, *, name: str = "another tokenizer") -> Corpus:
    """The corpus for `tokenizer`, called `name` from here on; the digest follows.

    Raises:
        CorpusError: requests whose token ids mean something and cannot be made again from text or messages.
    """
    if tokenizer.digest == corpus.tokenizer.digest:
        return corpus
    mistakes: list[str] = []
    requests = [encode_again(request, tokenizer, corpus.arbitrary_ids, mistakes) for request in corpus.requests]
    raise_mistakes(f"corpus {corpus.name}: cannot be re-tokenised", mistakes)
    named = TokenizerName(name=name, digest=tokenizer.digest, vocab_size=tokenizer.vocab_size)
    return with_requests(replace(corpus, tokenizer=named), requests)


def encode_again(request: Request, tokenizer: Tokenizer, arbitrary_ids: Iterable[str], mistakes: list[str]) -> Request:
    """One request for `tokenizer`; what cannot be carried over is noted."""
    try:
        ids = encode_prompt(request, tokenizer)
    except ModelError as error:  # a chat template that refuses the messages, or none at all
        mistakes.append(f"request {request.id!r}: {error}")
        return request
    if ids is None and "prompt_token_ids" in arbitrary_ids:
        ids = tuple(token % tokenizer.vocab_size for token in request.prompt_token_ids)
    if not ids:
        mistakes.append(
            f"request {request.id!r} has no text or messages to encode again, and its ids are not declared "
            "arbitrary; use the model it was frozen for, or freeze it again from text"
            if ids is None
            else f"request {request.id!r} has no tokens in this tokenizer; remove it from the corpus"
        )
    sampling = fold_sampling(request, tokenizer.vocab_size, frozenset(arbitrary_ids), mistakes)
    return replace(request, prompt_token_ids=ids or (), sampling=sampling)


def encode_prompt(request: Request, tokenizer: Tokenizer) -> tuple[int, ...] | None:
    """Token ids of the text or messages a request came from; None when it came from ids."""
    if request.text is not None:
        return tokenizer.encode(request.text)
    if request.messages is not None:
        return tokenizer.encode_chat([(message.role, message.content) for message in request.messages])
    return None


def fold_sampling(request: Request, vocab_size: int, arbitrary_ids: frozenset[str], mistakes: list[str]) -> Sampling:
    """The request's sampling with its arbitrary ids folded; ids that mean something are noted."""
    sampling = request.sampling
    mistakes.extend(
        f"request {request.id!r}: the token ids of {field} belong to the old tokenizer; "
        "freeze the corpus again with ids of the new one"
        for field in ("logit_bias", "stop_token_ids")
        if getattr(sampling, field) and field not in arbitrary_ids
    )
    biases: dict[int, float] = {}
    for token, bias in sampling.logit_bias:
        biases[unused(token % vocab_size, biases, vocab_size)] = bias
    stops = tuple(sorted({token % vocab_size for token in sampling.stop_token_ids}))
    return replace(sampling, logit_bias=tuple(sorted(biases.items())), stop_token_ids=stops)


def unused(token: int, used: Iterable[int], vocab_size: int) -> int:
    """`token`, or the next id of the vocabulary that is not in `used`; `token` when all are."""
    candidates = ((token + step) % vocab_size for step in range(vocab_size))
    return next((candidate for candidate in candidates if candidate not in used), token)


def check_fits(corpus: Corpus, vocab_size: int, max_position_embeddings: int) -> None:
    """Checks that every id is in the vocabulary and prompt plus output is within the model's context.

    Raises:
        CorpusError: names every request that does not fit.
    """
    mistakes: list[str] = []
    for request in corpus.requests:
        prompt, output = len(request.prompt_token_ids), request.sampling.max_tokens
        if prompt + output > max_position_embeddings:
            mistakes.append(
                f"request {request.id!r}: {prompt} prompt tokens and up to {output} new ones need "
                f"{prompt + output} positions, the model has {max_position_embeddings}; "
                "shorten it, lower max_tokens, or leave it out"
            )
        outside = [(field, token) for field, token in ids_of(request) if not 0 <= token < vocab_size]
        if outside:
            field, token = outside[0]
            mistakes.append(
                f"request {request.id!r}: {len(outside)} token ids are outside the model's vocabulary of "
                f"{vocab_size}, the first is {token} in {field}; re-tokenise the corpus for this model"
            )
    raise_mistakes(f"corpus {corpus.name}: does not fit the model", mistakes)


def ids_of(request: Request) -> list[tuple[str, int]]:
    """Every token id a request carries, with the field it stands in."""
    return [
        *(("prompt_token_ids", token) for token in request.prompt_token_ids),
        *(("logit_bias", token) for token, _ in request.sampling.logit_bias),
        *(("stop_token_ids", token) for token in request.sampling.stop_token_ids),
    ]
