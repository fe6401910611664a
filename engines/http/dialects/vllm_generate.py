"""vLLM's `/inference/v1/generate`: token ids in, token ids out, streamed. Served with `--enable-scale-out`.

Fields: vLLM 0.32 `entrypoints/scale_out/token_in_token_out/protocol.py`. It sends nothing. Rules: the chosen token
stands first in the list of candidates and pushes the last one out, so one more than wanted is asked for, as far as a
server gives them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from engines.http.answer import Answer, Candidates, finite
from engines.http.dialect import Prompt, folded_seed, ranked, refuse, refuse_images
from engines.http.dialects.grammars import spell_grammar
from engines.http.shape import Json, items, maybe, take
from harness.request import MAX_TOP_LOGPROBS, Request


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmGenerate:
    """The interface."""

    path: str = "/inference/v1/generate"
    streams: bool = True
    needs_done: bool = True
    takes_ids: bool = True
    seed_limit: int = 2**63

    def body(self, request: Request, prompt: Prompt, model: str) -> Json:
        """`sampling_params` are vLLM's own."""
        refuse_images(request)
        if prompt.ids is None:
            raise refuse(request, "prompt", "this interface takes token ids")
        one = request.sampling
        params: Json = {
            "temperature": one.temperature, "top_p": one.top_p, "top_k": one.top_k or -1, "min_p": one.min_p,
            "repetition_penalty": one.repetition_penalty, "frequency_penalty": one.frequency_penalty,
            "presence_penalty": one.presence_penalty, "max_tokens": one.max_tokens, "min_tokens": one.min_tokens,
            "ignore_eos": one.ignore_eos, "stop": list(one.stop), "stop_token_ids": list(one.stop_token_ids),
            "logprobs": min(one.logprobs + 1, MAX_TOP_LOGPROBS), "n": one.n,
        }  # fmt: skip
        if one.seed is not None:
            params["seed"] = folded_seed(request, self)
        if one.logit_bias:
            params["logit_bias"] = {str(token): bias for token, bias in one.logit_bias}
        if request.grammar is not None:
            params |= spell_grammar(request, request.grammar, "vllm")
        return {"model": model, "token_ids": list(prompt.ids), "sampling_params": params, "stream": True,
                "stream_options": {"include_usage": True}}  # fmt: skip

    def read(self, event: Json, answers: Sequence[Answer], at: float) -> None:
        """One chunk: its choices, and the counts that come with the last."""
        seen: set[int] = set()
        for item in items(take(event, "choices", list, "$"), dict, "$.choices"):
            choice = cast("Json", item)
            index = take(choice, "index", int, "$.choices[]")
            if index in seen or not 0 <= index < len(answers):
                raise ValueError(f"choice {index} is there twice or was not asked for")
            seen.add(index)
            _choice(choice, answers[index], at)
        usage = maybe(event, "usage", dict, "$")
        if usage is None:
            return
        details = maybe(usage, "prompt_tokens_details", dict, "$.usage") or {}
        completion = maybe(usage, "completion_tokens", int, "$.usage") if len(answers) == 1 else None
        for answer in answers:
            answer.count(
                maybe(usage, "prompt_tokens", int, "$.usage"), completion,
                maybe(details, "cached_tokens", int, "$.usage.prompt_tokens_details"),
            )  # fmt: skip


def _choice(choice: Json, answer: Answer, at: float) -> None:
    place = "$.choices[].logprobs.content"
    ids = items(maybe(choice, "token_ids", list, "$.choices[]") or [], int, "$.choices[].token_ids")
    detail = maybe(choice, "logprobs", dict, "$.choices[]")
    listed = maybe(detail, "content", list, "$.choices[].logprobs") if detail else None
    entries = None if listed is None else items(listed, dict, place)
    logprobs: list[float] | None = None
    tops: list[Candidates] | None = None
    if entries is not None:
        told = [take(entry, "token_id", int, f"{place}[]") for entry in entries]
        if told != ids:
            raise ValueError(f"token ids {ids[:4]} came with logprobs of {told[:4]}")
        logprobs = [finite(entry.get("logprob"), f"{place}[].logprob") for entry in entries]
        tops = [_top(entry, answer.candidates, place) for entry in entries]
    answer.add("ids", ids, logprobs, tops, at)
    if choice.get("finish_reason") is not None:
        answer.end(choice["finish_reason"], at)


def _top(entry: Json, count: int, place: str) -> Candidates:
    listed = items(take(entry, "top_logprobs", list, f"{place}[]"), dict, f"{place}[].top_logprobs")
    return ranked(
        (
            (take(one, "token_id", int, f"{place}[].top_logprobs[]"), finite(one.get("logprob"), f"{place} logprob"))
            for one in listed
        ),
        count,
    )
