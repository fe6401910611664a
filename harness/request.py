"""A request: a prompt as token ids, and sampling parameters with every field explicit.

It does not know any engine or tokenizer. Rules: nothing is left to an engine's default; temperature above 0 carries a
seed; a request is immutable and never shared between requests.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

MAX_TOP_LOGPROBS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Sampling parameters. Meanings and order of application: `docs/numerics.md`, section Sampling.

    `temperature` 0 is argmax. `top_k` 0, `top_p` 1.0 and `min_p` 0.0 are off; penalties are off at 1.0
    (repetition) and 0.0 (frequency, presence). `seed` is an unsigned 64-bit integer, None only at temperature 0.
    `logprobs` is the number of top candidates reported per position (0 to 20).
    """

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    frequency_penalty: float
    presence_penalty: float
    seed: int | None
    max_tokens: int
    min_tokens: int
    ignore_eos: bool
    stop: tuple[str, ...]
    stop_token_ids: tuple[int, ...]
    logit_bias: tuple[tuple[int, float], ...]
    logprobs: int
    n: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One chat message."""

    role: str
    content: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Grammar:
    """A constraint on the output: a JSON schema, a regular expression or an EBNF grammar."""

    kind: Literal["json_schema", "regex", "ebnf"]
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    """An image kept by digest; the bytes lie beside the corpus as `images/<sha256>`."""

    sha256: str
    media_type: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One frozen request. `text` or `messages` is what the ids came from, kept for re-tokenising."""

    id: str
    prompt_token_ids: tuple[int, ...]
    text: str | None
    messages: tuple[Message, ...] | None
    sampling: Sampling
    grammar: Grammar | None
    images: tuple[Image, ...]
