"""OpenAI's completions and chat completions, with vLLM's additions where a server takes them.

Fields: OpenAI's API reference; vLLM 0.32 `entrypoints/openai/{completion,chat_completion}/protocol.py`; samebits
`docs/serve.md`. It sends nothing. Rules: a token is told by `token_ids`, else by `token_id:N`, else by its text; a
completion's candidates are keyed by text in servers that know no ids, and such keys may collide, so they count as no
candidates at all; the end is a finish reason, the counts and `[DONE]`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from engines.http.answer import Answer, Candidates, Naming, finite, stand_in
from engines.http.dialect import Prompt, folded_seed, ranked, refuse, refuse_images
from engines.http.dialects.grammars import Spelling, spell_grammar
from engines.http.shape import Json, WrongShape, items, maybe, take
from harness.request import Request, Sampling

ID_PREFIX = "token_id:"
_SEEDS = 2**63  # vLLM and OpenAI keep a seed in a signed 64-bit integer


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenAi:
    """One of the two interfaces. `additions`: the server takes vLLM's fields; `grammars`: in whose words."""

    chat: bool
    additions: bool
    grammars: Spelling = "openai"
    seed_limit: int = _SEEDS
    streams: bool = True
    needs_done: bool = True

    @property
    def path(self) -> str:
        """Where requests go."""
        return "/v1/chat/completions" if self.chat else "/v1/completions"

    @property
    def takes_ids(self) -> bool:
        """Messages have no ids."""
        return not self.chat

    def body(self, request: Request, prompt: Prompt, model: str) -> Json:
        """Every field explicit; additions only where the server knows them or the request needs them."""
        refuse_images(request)
        sampling = request.sampling
        body: Json = {
            "model": model,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "frequency_penalty": sampling.frequency_penalty,
            "presence_penalty": sampling.presence_penalty,
            "n": sampling.n,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self._prompt(request, prompt),
            **self._limits(sampling),
            **self._additions(sampling),
        }
        if sampling.seed is not None:
            body["seed"] = folded_seed(request, self)
        if sampling.stop:
            body["stop"] = list(sampling.stop)
        if sampling.logit_bias:
            body["logit_bias"] = {str(token): bias for token, bias in sampling.logit_bias}
        if request.grammar is not None:
            body |= spell_grammar(request, request.grammar, self.grammars, chat=self.chat)
        return body

    def _prompt(self, request: Request, prompt: Prompt) -> Json:
        if not self.chat:
            if prompt.messages is not None:
                raise refuse(request, "messages", "completions take text or ids; set api=chat")
            return {"prompt": list(prompt.ids) if prompt.ids is not None else prompt.text}
        if prompt.messages is None:
            raise refuse(request, "prompt", "chat takes messages; set api=completions")
        return {"messages": [{"role": one.role, "content": one.content} for one in prompt.messages]}

    def _limits(self, sampling: Sampling) -> Json:
        if self.chat:
            return {"max_tokens": sampling.max_tokens, "logprobs": True, "top_logprobs": sampling.logprobs}
        return {"max_tokens": sampling.max_tokens, "logprobs": sampling.logprobs}

    def _additions(self, sampling: Sampling) -> Json:
        """What OpenAI's API has no word for: all of it to servers that do, else what is not at its neutral value."""
        values: Json = {
            "top_k": sampling.top_k or -1,
            "min_p": sampling.min_p,
            "repetition_penalty": sampling.repetition_penalty,
            "min_tokens": sampling.min_tokens,
            "ignore_eos": sampling.ignore_eos,
            "stop_token_ids": list(sampling.stop_token_ids),
        }
        if self.additions:
            return values | {"return_token_ids": True, "return_tokens_as_token_ids": True}
        neutral: Json = {"top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0, "min_tokens": 0, "ignore_eos": False,
                         "stop_token_ids": []}  # fmt: skip
        return {key: value for key, value in values.items() if value != neutral[key]}

    def read(self, event: Json, answers: Sequence[Answer], at: float) -> None:
        """One chunk: its choices, and the counts that come with the last."""
        seen: set[int] = set()
        for choice in items(take(event, "choices", list, "$"), dict, "$.choices"):
            index = take(choice, "index", int, "$.choices[]")
            if index in seen:
                raise ValueError(f"choice {index} is there twice in one event")
            if not 0 <= index < len(answers):
                raise ValueError(f"choice {index}: {len(answers)} were asked for")
            seen.add(index)
            self._choice(cast("Json", choice), answers[index], at)
        self._counts(event, answers)

    def _choice(self, choice: Json, answer: Answer, at: float) -> None:
        said = (maybe(choice, "delta", dict, "$.choices[]") or {}) if self.chat else choice
        answer.text += maybe(said, "content" if self.chat else "text", str, "$.choices[]") or ""
        ids = maybe(choice, "token_ids", list, "$.choices[]")
        detail = maybe(choice, "logprobs", dict, "$.choices[]")
        if ids is not None:
            items(ids, int, "$.choices[].token_ids")
        if detail is not None:
            (self._chat_detail if self.chat else self._detail)(detail, ids, answer, at)
        elif ids:
            answer.add("ids", ids, None, None, at)
        if choice.get("finish_reason") is not None:
            answer.end(choice["finish_reason"], at)

    def _detail(self, detail: Json, ids: list[int] | None, answer: Answer, at: float) -> None:
        place = "$.choices[].logprobs"
        names = items(take(detail, "tokens", list, place), str, f"{place}.tokens")
        naming, tokens = _tokens(names, ids)
        logprobs = [finite(value, f"{place}.token_logprobs[]") for value in take(detail, "token_logprobs", list, place)]
        tops: list[Candidates] | None = None
        listed = maybe(detail, "top_logprobs", list, place)
        if listed is not None and naming == "ids":
            tops = [_keyed(one, answer.candidates, place) for one in listed]
        answer.add(naming, tokens, logprobs, tops, at)

    def _chat_detail(self, detail: Json, ids: list[int] | None, answer: Answer, at: float) -> None:
        place = "$.choices[].logprobs.content"
        entries = items(maybe(detail, "content", list, "$.choices[].logprobs") or [], dict, place)
        naming, tokens = _tokens([_name(entry, place) for entry in entries], ids)
        logprobs = [finite(entry.get("logprob"), f"{place}[].logprob") for entry in entries]
        tops = [
            ranked(
                (
                    (_token(_name(one, place)), finite(one.get("logprob"), f"{place}[].top_logprobs[].logprob"))
                    for one in items(take(entry, "top_logprobs", list, f"{place}[]"), dict, f"{place}[].top_logprobs")
                ),
                answer.candidates,
            )
            for entry in entries
        ]
        comparable = naming == "ids" and all(_is_id(one) for entry in entries for one in _names(entry, place))
        answer.add(naming, tokens, logprobs, tops if comparable or naming == "names" else None, at)

    def _counts(self, event: Json, answers: Sequence[Answer]) -> None:
        usage = maybe(event, "usage", dict, "$")
        if usage is None:
            return
        details = maybe(usage, "prompt_tokens_details", dict, "$.usage")
        for answer in answers:
            answer.count(
                maybe(usage, "prompt_tokens", int, "$.usage"),
                maybe(usage, "completion_tokens", int, "$.usage") if len(answers) == 1 else None,
                maybe(details, "cached_tokens", int, "$.usage.prompt_tokens_details") if details else None,
            )


def _tokens(names: Sequence[str | bytes], ids: list[int] | None) -> tuple[Naming, list[int]]:
    """How tokens are told, and their numbers. Raises ValueError where two ways of telling do not match."""
    spelled = bool(names) and all(_is_id(name) for name in names)
    if ids is None:
        return ("ids" if spelled or not names else "names"), [_token(name) for name in names]
    if len(ids) != len(names):
        raise ValueError(f"{len(ids)} token ids came with {len(names)} names of tokens")
    if spelled and ids != [_token(name) for name in names]:
        raise ValueError(f"token ids {ids[:4]} came with the names {names[:4]}")
    return "ids", ids


def _is_id(name: str | bytes) -> bool:
    return isinstance(name, str) and name.startswith(ID_PREFIX) and name[len(ID_PREFIX) :].isdecimal()


def _token(name: str | bytes) -> int:
    if isinstance(name, str) and name.startswith(ID_PREFIX):
        digits = name[len(ID_PREFIX) :]
        if digits.isdecimal():
            return int(digits)
    return stand_in(name)


def _name(entry: Json, place: str) -> str | bytes:
    """`token_id:N` as it is; else the token's bytes where the server gives them, else its text."""
    name = take(entry, "token", str, f"{place}[]")
    octets = entry.get("bytes")
    if _is_id(name) or not isinstance(octets, list):
        return name
    try:
        return bytes(octets)
    except (TypeError, ValueError):
        raise ValueError(f"{place}[].bytes: expected bytes, found {str(octets)[:40]}") from None


def _names(entry: Json, place: str) -> list[str | bytes]:
    return [_name(cast("Json", one), place) for one in take(entry, "top_logprobs", list, f"{place}[]")]


def _keyed(value: object, count: int, place: str) -> Candidates:
    """Candidates of a completion: an object from name to logprob, or null where none were asked for."""
    if value is None and not count:
        return []
    if not isinstance(value, dict):
        raise WrongShape(f"{place}.top_logprobs[]: expected an object, found {value!r}")
    pairs = [(_token(name), finite(number, f"{place}.top_logprobs[]")) for name, number in value.items()]
    return ranked(pairs, count)
