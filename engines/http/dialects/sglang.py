"""SGLang's native `/generate`, streamed.

Fields: SGLang `srt/managers/io_struct.py` (GenerateReqInput), `srt/sampling/sampling_params.py` and the meta_info that
its tokenizer manager writes. It sends nothing. Rules: a seed is always sent where the request has one, for the server
draws with 42 when none is given; lists in events are cumulative or not, as the server is configured, and their length
against `completion_tokens` says which.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engines.http.answer import Answer, Candidates, finite
from engines.http.dialect import Prompt, folded_seed, ranked, refuse, refuse_images
from engines.http.dialects.grammars import spell_grammar
from engines.http.shape import Json, WrongShape, items, maybe, take
from harness.request import Request

_META = "$.meta_info"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sglang:
    """The interface."""

    path: str = "/generate"
    streams: bool = True
    needs_done: bool = True
    takes_ids: bool = True
    seed_limit: int = 2**31  # its hash mixes a 32-bit seed

    def body(self, request: Request, prompt: Prompt, model: str) -> Json:  # noqa: ARG002 - the server has one model
        """`sampling_params` are SGLang's own; text is left out of logprobs."""
        refuse_images(request)
        one = request.sampling
        if one.n != 1:
            raise refuse(request, "n", "several samples are not read from this interface")
        params: Json = {
            "temperature": one.temperature, "top_p": one.top_p, "top_k": one.top_k or -1, "min_p": one.min_p,
            "repetition_penalty": one.repetition_penalty, "frequency_penalty": one.frequency_penalty,
            "presence_penalty": one.presence_penalty, "max_new_tokens": one.max_tokens,
            "min_new_tokens": one.min_tokens, "ignore_eos": one.ignore_eos, "stop": list(one.stop),
            "stop_token_ids": list(one.stop_token_ids), "n": 1, "skip_special_tokens": False,
        }  # fmt: skip
        if one.seed is not None:
            params["sampling_seed"] = folded_seed(request, self)
        if one.logit_bias:
            params["logit_bias"] = {str(token): bias for token, bias in one.logit_bias}
        if request.grammar is not None:
            params |= spell_grammar(request, request.grammar, "sglang")
        told: Json = {"input_ids": list(prompt.ids)} if prompt.ids is not None else {"text": prompt.text}
        return {**told, "sampling_params": params, "return_logprob": True, "top_logprobs_num": one.logprobs,
                "return_text_in_logprobs": False, "stream": True}  # fmt: skip

    def read(self, event: Json, answers: Sequence[Answer], at: float) -> None:
        """One event: what is new of the lists, the counts, and the end."""
        answer = answers[0]
        meta = take(event, "meta_info", dict, "$")
        answer.text = maybe(event, "text", str, "$") or answer.text
        total = take(meta, "completion_tokens", int, _META)
        answer.count(maybe(meta, "prompt_tokens", int, _META), total, maybe(meta, "cached_tokens", int, _META))
        chosen = _new(meta, "output_token_logprobs", answer, total)
        tops = _new(meta, "output_top_logprobs", answer, total) if answer.candidates else None
        if chosen is not None:
            pairs = [read_pair(one) for one in chosen]
            ids, values = [token for token, _ in pairs], [value for _, value in pairs]
            answer.add("ids", ids, values, None if tops is None else [_top(one, answer) for one in tops], at)
        else:
            told = _new(event, "output_ids", answer, total) or []
            answer.add("ids", items(told, int, "$.output_ids"), None, None, at)
        reason = meta.get("finish_reason")
        if reason is not None:
            answer.end(reason.get("type") if isinstance(reason, dict) else reason, at)


def _new(value: Json, key: str, answer: Answer, total: int) -> list[object] | None:
    """The entries for tokens that are not known yet; None where the server sends no such list."""
    found = maybe(value, key, list, "$")
    if found is None:
        return None
    known = len(answer.tokens)
    if len(found) == total:
        return found[known:]
    if len(found) == total - known:
        return found
    raise ValueError(f"{key} has {len(found)} entries for {total} tokens, {known} of them known")


def read_pair(entry: object) -> tuple[int, float]:
    """(token id, logprob) of SGLang's [logprob, id, text or null]. Raises ValueError."""
    if not isinstance(entry, list) or len(entry) < 2 or not isinstance(entry[1], int):
        raise ValueError(f"{_META}: expected [logprob, token id, text], found {str(entry)[:60]}")
    return entry[1], finite(entry[0], f"{_META}: logprob of token {entry[1]}")


def _top(entry: object, answer: Answer) -> Candidates:
    if not isinstance(entry, list):
        raise WrongShape(f"{_META}.output_top_logprobs[]: expected a list, found {str(entry)[:60]}")
    return ranked((read_pair(one) for one in entry), answer.candidates)
