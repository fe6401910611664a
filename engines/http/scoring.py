"""Reads a given path as a prompt: what a server says of tokens it did not generate. It sends nothing.

No interface can be told which tokens to take. Some return the logprobs of a prompt, so prompt and path are sent
together and every position of the path is answered at once. Rules: what comes is checked against the very tokens that
were sent; a pick is told only where the raw logprobs decide it alone, and other requests are refused by name; a path
ends where it ends, so ends are compared with nothing; one request asks for one path.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from engines.http.answer import Answer, Candidates
from engines.http.dialect import Prompt, refuse
from engines.http.shape import Json, maybe
from engines.offline_checks import golden_paths
from harness.engine import Work
from harness.errors import EngineError, Unsupported
from harness.request import Request

WHOLE, WITHOUT_FIRST = "whole", "without-first"  # what is sent before a path; the second is a fault for controls
SAID = (
    "logprobs are those of prompt and path read together as a prompt; a pick is the best candidate there, "
    "not what the server's sampler took"
)


class Told(NamedTuple):
    """What a server says of one token of a prompt, given those before it."""

    logprob: float
    top: Candidates  # by value descending, id ascending
    pick: int  # the best token


class Scorer(Protocol):
    """How one interface is asked for the logprobs of a prompt."""

    @property
    def path(self) -> str:
        """Where requests are posted."""

    def ask(self, text: Sequence[int], first: int, candidates: int, model: str) -> Json:
        """The body that asks for `candidates` at text[first:], with as little generated as the interface allows."""

    def tell(self, answer: Json, text: Sequence[int], first: int, candidates: int) -> list[Told]:
        """One entry per token of text[first:]. Raises ValueError for another shape."""


class Path(NamedTuple):
    """Tokens to be read, and the reason with which they ended."""

    tokens: tuple[int, ...]
    finish: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredPath:
    """One path as a dialect of its own: `text` is what is sent, and it ends with the path."""

    scorer: Scorer
    text: tuple[int, ...]
    along: Path
    streams: bool = False
    needs_done: bool = False
    takes_ids: bool = True
    seed_limit: int = 1  # nothing is drawn

    @property
    def path(self) -> str:
        """Where the request goes."""
        return self.scorer.path

    @property
    def first(self) -> int:
        """Where the path begins in the text."""
        return len(self.text) - len(self.along.tokens)

    def body(self, request: Request, prompt: Prompt, model: str) -> Json:  # noqa: ARG002 - the text is the prompt
        """The request's body."""
        return self.scorer.ask(self.text, self.first, request.sampling.logprobs, model)

    def read(self, event: Json, answers: Sequence[Answer], at: float) -> None:
        """The whole answer. Raises ValueError."""
        answer = answers[0]
        told = self.scorer.tell(event, self.text, self.first, answer.candidates)
        tops = [one.top for one in told] if answer.candidates else None
        answer.add("ids", self.along.tokens, [one.logprob for one in told], tops, at)
        answer.picks += [one.pick for one in told]
        usage = maybe(event, "usage", dict, "$") or maybe(event, "meta_info", dict, "$") or {}
        answer.count(maybe(usage, "prompt_tokens", int, "$.usage"), None, _cached(usage))
        answer.end(self.along.finish, at)


def check_paths(work: Work, prompts: Mapping[str, Prompt], sent: str) -> dict[str, tuple[int, ...]]:
    """Judged request to the tokens sent before its path; `sent` is WHOLE or WITHOUT_FIRST.

    Raises Unsupported, EngineError, naming a request of which a path read as a prompt would not tell enough.
    """
    requests = {one.id: one for one in work.requests}
    found = {}
    for arrival in work.schedule.arrivals:
        if arrival.companion:
            continue
        request, ids = requests[arrival.request], prompts[arrival.request].ids
        _refuse_hidden_pick(request)
        if ids is None:
            raise refuse(request, "prompt", "a path is read after token ids; use a model whose tokenizer is known")
        found[request.id] = ids[1:] if sent == WITHOUT_FIRST else ids
        if not found[request.id]:
            raise EngineError(f"request {request.id!r}: scored_prompt={sent} leaves nothing of its prompt")
    return found


def plan_paths(
    work: Work, scorer: Scorer, before: Mapping[str, tuple[int, ...]], generated: Mapping[str, Answer]
) -> dict[str, ScoredPath]:
    """What is read after `before`: each request's golden path, or in natural replay what was `generated` just now.

    Raises Unsupported, EngineError, naming the request.
    """
    golden = golden_paths(work)
    requests = {one.id: one for one in work.requests}
    paths = {
        name: _golden(requests[name], golden[name]) if work.replay == "golden" else _made(name, generated[name])
        for name in before
    }
    return {
        name: ScoredPath(scorer=scorer, text=(*before[name], *path.tokens), along=path) for name, path in paths.items()
    }


def _golden(request: Request, tokens: tuple[int, ...]) -> Path:
    sampling = request.sampling
    if len(tokens) < sampling.max_tokens:
        return Path(tokens, "stop")
    if not sampling.ignore_eos or sampling.stop or sampling.stop_token_ids:
        raise refuse(request, "ignore_eos", "whether a path of max_tokens was stopped by its last one is not told")
    return Path(tokens, "length")


def _made(name: str, answer: Answer) -> Path:
    if answer.naming != "ids" or answer.finish is None:
        raise Unsupported(f"request {name!r}: its answer holds no token ids, so there is no path; use scoring=decode")
    return Path(tuple(answer.tokens), answer.finish)


def _refuse_hidden_pick(request: Request) -> None:
    """Raises Unsupported where a sampler would not simply take the best raw token."""
    one = request.sampling
    moved = {"temperature": one.temperature, "repetition_penalty": one.repetition_penalty != 1.0,
             "frequency_penalty": one.frequency_penalty, "presence_penalty": one.presence_penalty,
             "logit_bias": one.logit_bias, "min_tokens": one.min_tokens, "grammar": request.grammar,
             "n": one.n != 1}  # fmt: skip
    for field, value in moved.items():
        if value:
            raise refuse(request, field, "a path read as a prompt does not say what the sampler would have taken")


def _cached(usage: Json) -> int | None:
    details = maybe(usage, "prompt_tokens_details", dict, "$.usage")
    return maybe(details or usage, "cached_tokens", int, "$.usage")
