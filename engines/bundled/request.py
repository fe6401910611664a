"""A generation request as the engine takes it, and the checks it must pass before it may wait in line.

It does not know schedules or the harness. Rules: every sampling field is explicit; what cannot be run as
written is refused at submission by name, never bent to fit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from engines.bundled.config import EngineConfig, ModelConfig
from engines.bundled.errors import RequestError

MAX_TOP_LOGPROBS = 20
SEED_LIMIT = 2**64
LEAST_TEMPERATURE = 1e-30  # below it (x - max) / T leaves float32 for every pair of different logits


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Sampling parameters; docs/numerics.md fixes their meaning and the order in which they apply."""

    temperature: float  # 0 is argmax
    top_p: float  # 1 is off
    top_k: int  # 0 is off
    min_p: float  # 0 is off
    repetition_penalty: float  # 1 is off
    frequency_penalty: float  # 0 is off
    presence_penalty: float  # 0 is off
    seed: int | None  # unsigned 64-bit; None only at temperature 0
    max_tokens: int
    min_tokens: int
    ignore_eos: bool
    stop: tuple[str, ...]
    stop_token_ids: tuple[int, ...]
    logit_bias: tuple[tuple[int, float], ...]
    logprobs: int  # top candidates reported per position


@dataclass(frozen=True, slots=True, kw_only=True)
class Grammar:
    """What the output must be: JSON of a schema, a match of a regular expression, or a sentence of a grammar."""

    kind: Literal["json_schema", "regex", "ebnf"]
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One sample of one prompt. `forced` is a token path to follow instead of the sampler's own picks.

    `priority` counts under the policy of that name alone: lower runs sooner. `rollback` counts where the engine's own
    setting of that name is "request": decode this one on the fast path and verify it.
    """

    id: str
    prompt: tuple[int, ...]
    sampling: Sampling
    grammar: Grammar | None = None
    sample: int = 0
    forced: tuple[int, ...] | None = None
    scored: bool = False  # the forced path is read as a prompt is, many tokens in a step
    logits_digest: bool = False
    priority: int = 0
    rollback: bool = False

    @property
    def most_tokens(self) -> int:
        """The most tokens the prompt and its output can come to."""
        return len(self.prompt) + (len(self.forced) if self.forced is not None else self.sampling.max_tokens)


def check_request(request: Request, model: ModelConfig, engine: EngineConfig) -> None:
    """Raises RequestError, naming the request, if it cannot be run as written."""
    reasons = (
        *_prompt_faults(request, model),
        *_sampling_faults(request.sampling, model),
        *_forced_faults(request, model),
        *_room_faults(request, model, engine),
    )
    if reasons:
        msg = f"request {request.id!r}: " + "; ".join(reasons)
        raise RequestError(msg)


def _prompt_faults(request: Request, model: ModelConfig) -> list[str]:
    if not request.prompt:
        return ["the prompt is empty; at least one token id is needed"]
    return _vocabulary_faults("prompt token", enumerate(request.prompt), model)


def _forced_faults(request: Request, model: ModelConfig) -> list[str]:
    if request.forced is None:
        return []
    if not request.forced:
        return ["the forced path is empty; at least one token id is needed"]
    if len(request.forced) > request.sampling.max_tokens:
        allowed = request.sampling.max_tokens
        return [f"the forced path has {len(request.forced)} tokens, max_tokens allows {allowed}"]
    return _vocabulary_faults("forced token", enumerate(request.forced), model)


def _vocabulary_faults(what: str, tokens: enumerate[int], model: ModelConfig) -> list[str]:
    for index, token in tokens:
        if not 0 <= token < model.vocab_size:
            return [f"{what} {index} is {token}, outside the vocabulary of {model.vocab_size} ids"]
    return []


def _room_faults(request: Request, model: ModelConfig, engine: EngineConfig) -> list[str]:
    prompt, limit = len(request.prompt), model.max_position_embeddings
    if prompt >= limit:
        return [f"the prompt has {prompt} tokens, longer than the context of {limit} leaves room to answer"]
    output = request.most_tokens - prompt
    if request.most_tokens > limit:
        return [f"prompt of {prompt} and output of {output} tokens exceed the context of {limit}"]
    needed = request.most_tokens - 1  # the last token's keys and values are never needed
    if needed > engine.num_pages * engine.page_size:
        pool = f"{engine.num_pages} pages of {engine.page_size} tokens"
        return [f"needs KV pages for {needed} tokens, more than the whole pool of {pool}; raise num_pages"]
    return []


def _sampling_faults(sampling: Sampling, model: ModelConfig) -> list[str]:
    number = "a finite number"
    rules: tuple[tuple[str, bool, str], ...] = (
        ("temperature", _is_temperature(sampling.temperature), f"0, or {number} >= {LEAST_TEMPERATURE}"),
        ("top_p", 0 < sampling.top_p <= 1, "a number in (0, 1]"),
        ("top_k", sampling.top_k >= 0, "0 (off) or more"),
        ("min_p", 0 <= sampling.min_p <= 1, "a number in [0, 1]"),
        ("repetition_penalty", 0 < sampling.repetition_penalty < math.inf, f"{number} > 0"),
        ("frequency_penalty", math.isfinite(sampling.frequency_penalty), number),
        ("presence_penalty", math.isfinite(sampling.presence_penalty), number),
        ("max_tokens", sampling.max_tokens >= 1, "1 or more"),
        ("min_tokens", 0 <= sampling.min_tokens <= sampling.max_tokens, "0 to max_tokens"),
        ("logprobs", 0 <= sampling.logprobs <= MAX_TOP_LOGPROBS, f"0 to {MAX_TOP_LOGPROBS}"),
        ("seed", sampling.seed is None or 0 <= sampling.seed < SEED_LIMIT, "an unsigned 64-bit integer"),
        ("stop", all(sampling.stop), "strings of at least one character"),
    )
    faults = [f"{name}: expected {text}, got {getattr(sampling, name)!r}" for name, good, text in rules if not good]
    if sampling.temperature > 0 and sampling.seed is None:
        faults.append(f"temperature {sampling.temperature} needs a seed: a draw without one cannot be repeated")
    return faults + _id_faults(sampling, model)


def _id_faults(sampling: Sampling, model: ModelConfig) -> list[str]:
    biased = [token for token, _ in sampling.logit_bias]
    faults = _vocabulary_faults("stop_token_ids entry", enumerate(sampling.stop_token_ids), model)
    faults += _vocabulary_faults("logit_bias entry", enumerate(biased), model)
    if len(set(biased)) != len(biased):
        faults.append("logit_bias names a token twice")
    faults += [
        f"logit_bias of {token} is {bias!r}, not finite"
        for token, bias in sampling.logit_bias
        if not math.isfinite(bias)
    ]
    return faults


def _is_temperature(number: float) -> bool:
    return math.isfinite(number) and (number == 0 or number >= LEAST_TEMPERATURE)
