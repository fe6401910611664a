"""Text Generation Inference's `/generate_stream`.

Fields: TGI's published schemas of `text-generation` (stream_output.json and input.json). It sends nothing. Rules:
prompts are text; what the interface has no word for is refused by name, ignore_eos included.
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

_ENDS = {"length": "length", "eos_token": "stop", "stop_sequence": "stop"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Tgi:
    """The interface."""

    path: str = "/generate_stream"
    streams: bool = True
    needs_done: bool = False
    takes_ids: bool = False
    seed_limit: int = 2**63

    def body(self, request: Request, prompt: Prompt, model: str) -> Json:  # noqa: ARG002 - the server has one model
        """A draw is asked for by `do_sample`; a parameter at its neutral value is null, which is TGI's word for off."""
        refuse_images(request)
        one = request.sampling
        unknown = {"min_p": one.min_p, "min_tokens": one.min_tokens, "ignore_eos": one.ignore_eos,
                   "stop_token_ids": one.stop_token_ids, "presence_penalty": one.presence_penalty,
                   "logit_bias": one.logit_bias, "n": one.n > 1}  # fmt: skip
        for field, value in unknown.items():
            if value:
                raise refuse(request, field, "TGI's /generate_stream has no word for it")
        if prompt.text is None:
            raise refuse(request, "prompt", "TGI takes text")
        draws = one.temperature > 0
        parameters: Json = {
            "max_new_tokens": one.max_tokens, "do_sample": draws, "temperature": one.temperature if draws else None,
            "top_k": one.top_k or None, "top_p": one.top_p if one.top_p < 1 else None,
            "repetition_penalty": one.repetition_penalty if one.repetition_penalty != 1 else None,
            "frequency_penalty": one.frequency_penalty or None, "stop": list(one.stop), "details": True,
            "decoder_input_details": False, "return_full_text": False, "top_n_tokens": one.logprobs or None,
            "seed": folded_seed(request, self), "watermark": False, "truncate": None, "typical_p": None,
            **({} if request.grammar is None else spell_grammar(request, request.grammar, "tgi")),
        }  # fmt: skip
        return {"inputs": prompt.text, "parameters": parameters, "stream": True}

    def read(self, event: Json, answers: Sequence[Answer], at: float) -> None:
        """One event is one token; the last one carries the details."""
        answer = answers[0]
        token = take(event, "token", dict, "$")
        listed = maybe(event, "top_tokens", list, "$")
        tops = None if listed is None or not answer.candidates else [_top(listed, answer)]
        value = finite(token.get("logprob"), "$.token.logprob")
        answer.text += maybe(token, "text", str, "$.token") or ""
        answer.add("ids", [take(token, "id", int, "$.token")], [value], tops, at)
        details = maybe(event, "details", dict, "$")
        if details is not None:
            prompt = maybe(details, "input_length", int, "$.details")
            answer.count(prompt, maybe(details, "generated_tokens", int, "$.details"), None)
            reason = take(details, "finish_reason", str, "$.details")
            answer.end(_ENDS.get(reason, reason), at)


def _top(listed: list[object], answer: Answer) -> Candidates:
    entries = [cast("Json", entry) for entry in items(listed, dict, "$.top_tokens")]
    return ranked(
        (
            (take(entry, "id", int, "$.top_tokens[]"), finite(entry.get("logprob"), "$.top_tokens[]"))
            for entry in entries
        ),
        answer.candidates,
    )
