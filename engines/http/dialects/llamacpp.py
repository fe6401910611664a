"""llama.cpp's own server: `/completion`, streamed.

Fields: llama.cpp `tools/server/README.md`, and build 11549 as it was seen to answer. It sends nothing. Rules: the
prompt cache is switched off per request, for the server says itself that reuse can move bits; samplers that the request
does not ask for are switched off by name; probabilities are those before sampling. A token that ends inside a UTF-8
character gets no event of its own, so that the counts at the end do not match: the answer is then an error.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from engines.http.answer import Answer, Candidates, finite
from engines.http.dialect import Prompt, folded_seed, ranked, refuse, refuse_images
from engines.http.dialects.grammars import spell_grammar
from engines.http.shape import Json, items, maybe, take
from harness.request import Request

_ENDS = {"limit": "length", "eos": "stop", "word": "stop"}
_MORE = 16  # tokens that a server may put before a prompt
_PROBABILITIES = "$.completion_probabilities"


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaCpp:
    """The interface."""

    path: str = "/completion"
    streams: bool = True
    needs_done: bool = False
    takes_ids: bool = True
    seed_limit: int = 2**32 - 1  # 32 bits, of which all ones stand for a random seed

    def body(self, request: Request, prompt: Prompt, model: str) -> Json:  # noqa: ARG002 - the server has one model
        """Every sampler at the request's value or off."""
        refuse_images(request)
        one = request.sampling
        shortened = one.min_tokens and not one.ignore_eos  # ignore_eos bans the end altogether
        for field, set_ in (("min_tokens", shortened), ("stop_token_ids", one.stop_token_ids), ("n", one.n > 1)):
            if set_:
                raise refuse(request, field, "llama.cpp's /completion has no word for it")
        body: Json = {
            "prompt": list(prompt.ids) if prompt.ids is not None else prompt.text,
            "n_predict": one.max_tokens, "temperature": one.temperature, "top_k": one.top_k, "top_p": one.top_p,
            "min_p": one.min_p, "repeat_penalty": one.repetition_penalty, "repeat_last_n": _reach(request),
            "frequency_penalty": one.frequency_penalty, "presence_penalty": one.presence_penalty,
            "ignore_eos": one.ignore_eos, "stop": list(one.stop), "n_probs": max(1, one.logprobs),
            "logit_bias": [[token, bias] for token, bias in one.logit_bias], "post_sampling_probs": False,
            "samplers": ["penalties", "top_k", "top_p", "min_p", "temperature"],
            "cache_prompt": False, "return_tokens": True, "stream": True,
        }  # fmt: skip
        if one.seed is not None:
            body["seed"] = folded_seed(request, self)
        if request.grammar is not None:
            body |= spell_grammar(request, request.grammar, "llamacpp")
        return body

    def read(self, event: Json, answers: Sequence[Answer], at: float) -> None:
        """One event: tokens with their probabilities; the last one says why it ended."""
        answer = answers[0]
        answer.text += maybe(event, "content", str, "$") or ""
        ids = maybe(event, "tokens", list, "$")
        listed = maybe(event, "completion_probabilities", list, "$")
        last = event.get("stop") is True
        if listed:
            entries = items(listed, dict, _PROBABILITIES)
            tokens = [take(cast("Json", entry), "id", int, f"{_PROBABILITIES}[]") for entry in entries]
            if ids and not last and ids != tokens:
                raise ValueError(f"tokens {ids[:4]} came with probabilities of {tokens[:4]}")
            logprobs = [finite(entry.get("logprob"), f"{_PROBABILITIES}[].logprob") for entry in entries]
            answer.add("ids", tokens, logprobs, [_top(cast("Json", entry), answer) for entry in entries], at)
        elif ids and not last:
            answer.add("ids", items(ids, int, "$.tokens"), None, None, at)
        if last:
            answer.count(maybe(event, "tokens_evaluated", int, "$"), maybe(event, "tokens_predicted", int, "$"), None)
            kind = take(event, "stop_type", str, "$")
            answer.end(_ENDS.get(kind, kind), at)


def _reach(request: Request) -> int:
    """Tokens that penalties look back on: all of them. Its -1 for that was given up between two builds."""
    return len(request.prompt_token_ids) + request.sampling.max_tokens + _MORE


def _top(entry: Json, answer: Answer) -> Candidates:
    place = f"{_PROBABILITIES}[].top_logprobs"
    listed = items(take(entry, "top_logprobs", list, f"{_PROBABILITIES}[]"), dict, place)
    pairs = [(take(cast("Json", one), "id", int, f"{place}[]"), finite(one.get("logprob"), place)) for one in listed]
    return ranked(pairs, answer.candidates)
