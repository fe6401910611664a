"""The logprobs of a prompt as servers return them: vLLM's `prompt_logprobs` and SGLang's `input_token_logprobs`.

Fields: vLLM 0.32 `entrypoints/openai/completion/protocol.py` and `entrypoints/scale_out/token_in_token_out`; samebits
`docs/serve.md`; SGLang `srt/managers/io_struct.py` and the meta_info of its tokenizer manager. It sends nothing. Rules:
one token is generated and left aside, for not every interface may generate none; SGLang pads the first entry that it
returns, so one token more is asked for; the first of equal candidates is the server's own, where it ranks them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from engines.http.answer import finite
from engines.http.dialect import ranked
from engines.http.dialects.sglang import read_pair
from engines.http.scoring import Told
from engines.http.shape import Json, WrongShape, items, maybe, take


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionScorer:
    """`/v1/completions` of vLLM and samebits: a list per choice."""

    path: str = "/v1/completions"

    def ask(self, text: Sequence[int], first: int, candidates: int, model: str) -> Json:  # noqa: ARG002 - all come
        """A greedy token, and everything before it."""
        return {"model": model, "prompt": list(text), "max_tokens": 1, "temperature": 0.0, "stream": False,
                "prompt_logprobs": max(1, candidates)}  # fmt: skip

    def tell(self, answer: Json, text: Sequence[int], first: int, candidates: int) -> list[Told]:
        """From the only choice."""
        choices = items(take(answer, "choices", list, "$"), dict, "$.choices")
        if len(choices) != 1:
            raise ValueError(f"{len(choices)} choices came, one was asked for")
        listed = take(cast("Json", choices[0]), "prompt_logprobs", list, "$.choices[0]")
        return _told(listed, "$.choices[0].prompt_logprobs", text, first, candidates)


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmScorer:
    """vLLM's `/inference/v1/generate`: one list beside the choices."""

    path: str = "/inference/v1/generate"

    def ask(self, text: Sequence[int], first: int, candidates: int, model: str) -> Json:  # noqa: ARG002 - all come
        """A greedy token, and everything before it."""
        params = {"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": max(1, candidates)}
        return {"model": model, "token_ids": list(text), "sampling_params": params, "stream": False}

    def tell(self, answer: Json, text: Sequence[int], first: int, candidates: int) -> list[Told]:
        """From the answer."""
        return _told(take(answer, "prompt_logprobs", list, "$"), "$.prompt_logprobs", text, first, candidates)


@dataclass(frozen=True, slots=True, kw_only=True)
class SglangScorer:
    """SGLang's `/generate`, from `logprob_start_len` on."""

    path: str = "/generate"

    def ask(self, text: Sequence[int], first: int, candidates: int, model: str) -> Json:  # noqa: ARG002 - one model
        """A greedy token, and everything from the token before the path on."""
        return {"input_ids": list(text), "sampling_params": {"temperature": 0.0, "max_new_tokens": 1},
                "return_logprob": True, "logprob_start_len": first - 1, "top_logprobs_num": max(1, candidates),
                "return_text_in_logprobs": False, "stream": False}  # fmt: skip

    def tell(self, answer: Json, text: Sequence[int], first: int, candidates: int) -> list[Told]:
        """From meta_info; its first entries are padding."""
        meta, place = take(answer, "meta_info", dict, "$"), "$.meta_info"
        own = take(meta, "input_token_logprobs", list, place)
        tops = take(meta, "input_top_logprobs", list, place)
        wanted = len(text) - first + 1
        if len(own) != wanted or len(tops) != wanted:
            raise ValueError(f"{len(own)} tokens and {len(tops)} lists of candidates came, {wanted} were asked for")
        pairs = [read_pair(one) for one in own[1:]]
        if [token for token, _ in pairs] != list(text[first:]):
            raise ValueError(f"logprobs came for tokens {[token for token, _ in pairs][:4]}, not {text[first:][:4]}")
        return [_told_one(value, top, candidates) for (_, value), top in zip(pairs, tops[1:], strict=True)]


def _told(listed: list[object], place: str, text: Sequence[int], first: int, candidates: int) -> list[Told]:
    if len(listed) != len(text):
        raise ValueError(f"{place} has {len(listed)} entries for {len(text)} tokens")
    return [_entry(listed[i], f"{place}[{i}]", text[i], candidates) for i in range(first, len(text))]


def _entry(value: object, place: str, token: int, candidates: int) -> Told:
    """vLLM's object by token id: the token itself and the best ones, each with `logprob` and `rank`."""
    if not isinstance(value, dict):
        raise WrongShape(f"{place}: expected an object, found {str(value)[:40]}")
    entries = {_id(name, place): take(cast("Json", value), name, dict, place) for name in value}
    numbers = {one: finite(entry.get("logprob"), f"{place}.{one}.logprob") for one, entry in entries.items()}
    if token not in numbers:
        raise ValueError(f"{place}: token {token}, which was sent there, is not among {sorted(numbers)[:6]}")
    best = ranked(numbers.items(), len(numbers))
    first = next((one for one, entry in entries.items() if maybe(entry, "rank", int, place) == 1), best[0][0])
    return Told(logprob=numbers[token], top=best[:candidates], pick=first)


def _told_one(value: float, top: object, candidates: int) -> Told:
    if not isinstance(top, list) or not top:
        raise WrongShape(f"$.meta_info.input_top_logprobs[]: expected a list of candidates, found {str(top)[:40]}")
    best = ranked((read_pair(one) for one in top), len(top))
    return Told(logprob=value, top=best[:candidates], pick=best[0][0])


def _id(name: str, place: str) -> int:
    if not name.isdecimal():
        raise WrongShape(f"{place}: expected token ids as keys, found {name!r}")
    return int(name)
