"""vLLM's `/inference/v1/generate`: token ids in, token ids out. Served with `--enable-scale-out`.

Fields: vLLM 0.32 `entrypoints/scale_out`, as seen on a running server. It sends nothing. Rules: the whole answer is one
body, so it says nothing about who ran beside whom.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from engines.http.answer import Answer, Candidates, finite
from engines.http.dialect import Prompt, folded_seed, ranked, refuse, refuse_images
from engines.http.shape import Json, items, maybe, take
from harness.request import Request


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmGenerate:
    """The interface."""

    path: str = "/inference/v1/generate"
    streams: bool = False
    needs_done: bool = False
    takes_ids: bool = True
    seed_limit: int = 2**63

    def body(self, request: Request, prompt: Prompt, model: str) -> Json:
        """`sampling_params` are vLLM's own."""
        refuse_images(request)
        if request.grammar is not None:
            raise refuse(request, "grammar", "not sent through this interface; set api=completions")
        if prompt.ids is None:
            raise refuse(request, "prompt", "this interface takes token ids")
        one = request.sampling
        params: Json = {
            "temperature": one.temperature, "top_p": one.top_p, "top_k": one.top_k or -1, "min_p": one.min_p,
            "repetition_penalty": one.repetition_penalty, "frequency_penalty": one.frequency_penalty,
            "presence_penalty": one.presence_penalty, "max_tokens": one.max_tokens, "min_tokens": one.min_tokens,
            "ignore_eos": one.ignore_eos, "stop": list(one.stop), "stop_token_ids": list(one.stop_token_ids),
            "logprobs": one.logprobs, "n": one.n,
        }  # fmt: skip
        if one.seed is not None:
            params["seed"] = folded_seed(request, self)
        if one.logit_bias:
            params["logit_bias"] = {str(token): bias for token, bias in one.logit_bias}
        return {"model": model, "token_ids": list(prompt.ids), "sampling_params": params, "stream": False}

    def read(self, event: Json, answers: Sequence[Answer], at: float) -> None:
        """The whole answer."""
        seen: set[int] = set()
        for item in items(take(event, "choices", list, "$"), dict, "$.choices"):
            choice = cast("Json", item)
            index = take(choice, "index", int, "$.choices[]")
            if index in seen or not 0 <= index < len(answers):
                raise ValueError(f"choice {index} is there twice or was not asked for")
            seen.add(index)
            _choice(choice, answers[index], at)
        usage = maybe(event, "usage", dict, "$") or {}
        for answer in answers:
            answer.count(maybe(usage, "prompt_tokens", int, "$.usage"), None, None)


def _choice(choice: Json, answer: Answer, at: float) -> None:
    place = "$.choices[].logprobs.content"
    ids = items(take(choice, "token_ids", list, "$.choices[]"), int, "$.choices[].token_ids")
    detail = maybe(choice, "logprobs", dict, "$.choices[]")
    entries = items(take(detail, "content", list, "$.choices[].logprobs"), dict, place) if detail else None
    logprobs: list[float] | None = None
    tops: list[Candidates] | None = None
    if entries is not None:
        told = [take(entry, "token_id", int, f"{place}[]") for entry in entries]
        if told != ids:
            raise ValueError(f"token ids {ids[:4]} came with logprobs of {told[:4]}")
        logprobs = [finite(entry.get("logprob"), f"{place}[].logprob") for entry in entries]
        tops = [_top(entry, answer.candidates, place) for entry in entries]
    answer.add("ids", ids, logprobs, tops, at)
    answer.end(choice.get("finish_reason"), at)


def _top(entry: Json, count: int, place: str) -> Candidates:
    listed = items(take(entry, "top_logprobs", list, f"{place}[]"), dict, f"{place}[].top_logprobs")
    return ranked(
        (
            (take(one, "token_id", int, f"{place}[].top_logprobs[]"), finite(one.get("logprob"), f"{place} logprob"))
            for one in listed
        ),
        count,
    )
