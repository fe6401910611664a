"""Subsets and views of a corpus: other corpora over the same requests, with digests of their own.

It does not know folders. Rules: requests keep their order; prompts never change; a view changes sampling
only; the same corpus gives the same view everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from harness.canonical import digest
from harness.corpus.manifest import content_digest
from harness.errors import CorpusError
from harness.request import Request, Sampling
from harness.suggest import did_you_mean

if TYPE_CHECKING:
    from harness.corpus import Corpus

VIEW_TEMPERATURE: Final = 0.8  # what the seeded view gives to greedy requests


def with_requests(corpus: Corpus, requests: Sequence[Request], *, name: str | None = None) -> Corpus:
    """The corpus with other requests and the digest that belongs to them.

    Raises:
        CorpusError: there are none.
    """
    if not requests:
        raise CorpusError(f"corpus {corpus.name}: nothing is left of it; keep at least one request")
    digest = content_digest(corpus.tokenizer, corpus.arbitrary_ids, requests)
    return replace(corpus, requests=tuple(requests), digest=digest, name=name or corpus.name)


def take(corpus: Corpus, wanted: int | Sequence[str]) -> Corpus:
    """The first `wanted` requests, or those with the ids `wanted`, in the order of the corpus.

    Raises:
        CorpusError: a count that is not between 1 and the corpus's size, an unknown id, or no id at all.
    """
    if isinstance(wanted, int):
        if not 1 <= wanted <= len(corpus.requests):
            raise CorpusError(
                f"corpus {corpus.name}: cannot take {wanted} requests; expected 1 to {len(corpus.requests)}"
            )
        return with_requests(corpus, corpus.requests[:wanted])
    ids = [request.id for request in corpus.requests]
    for name in wanted:
        if name not in ids:
            raise CorpusError(f"corpus {corpus.name}: no request {name!r}; {did_you_mean(name, ids)}")
    return with_requests(corpus, [request for request in corpus.requests if request.id in set(wanted)])


def greedy(corpus: Corpus) -> Corpus:
    """The same requests at temperature 0 without a seed."""
    return map_sampling(corpus, "greedy", lambda request: replace(request.sampling, temperature=0.0, seed=None))


def seeded(corpus: Corpus) -> Corpus:
    """The same requests, all drawn: greedy ones get temperature 0.8 and a seed derived from their content."""
    return map_sampling(corpus, "seeded", seeded_sampling)


def seeded_sampling(request: Request) -> Sampling:
    """The request's sampling if it draws already, else one that does."""
    if request.sampling.temperature > 0:
        return request.sampling
    prompt: object = list(request.prompt_token_ids)
    return replace(request.sampling, temperature=VIEW_TEMPERATURE, seed=derive_seed(request.id, prompt))


def map_sampling(corpus: Corpus, view: str, change: Callable[[Request], Sampling]) -> Corpus:
    """The view of a corpus in which every request's sampling is changed."""
    requests = [replace(request, sampling=change(request)) for request in corpus.requests]
    return with_requests(corpus, requests, name=f"{corpus.name}:{view}")


def derive_seed(request_id: str, prompt: object) -> int:
    """A seed below 2**64 that is a function of the request's id and prompt (any JSON value)."""
    return int(digest(["samebits-seed-1", request_id, prompt])[:16], 16)


VIEWS: Final[dict[str, Callable[[Corpus], Corpus]]] = {"greedy": greedy, "seeded": seeded}
