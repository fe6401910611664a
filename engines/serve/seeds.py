"""Where a seed comes from when a request brings none. It knows no engine and draws nothing itself.

Rules: a draw without a seed cannot be repeated, so a deterministic arithmetic refuses it unless seeds are derived;
a derived seed hangs on the prompt and on what shapes the distribution, on nothing else: asking for logprobs, more
tokens, more choices or a stream changes no token; every seed used is reported.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable
from typing import Literal

from engines.bundled.request import Grammar, Sampling
from engines.serve.errors import ApiError

SeedPolicy = Literal["refuse", "derive"]
SeedSource = Literal["request", "derived", "random", "none"]
ORDER_FREE = ("free", "native")  # arithmetics that promise no bits
DERIVATION = 1  # version of the derivation; part of what is hashed
SEED_BITS = 53  # every JSON reader keeps such an integer
_SHAPING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty",
            "logit_bias")  # fmt: skip


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Seeding:
    """How one server settles seeds. `draw` returns a fresh random seed, for arithmetics that promise no bits."""

    arithmetic: str
    policy: SeedPolicy
    draw: Callable[[], int]

    def settle(
        self, prompt: tuple[int, ...], sampling: Sampling, grammar: Grammar | None = None
    ) -> tuple[Sampling, SeedSource]:
        """The sampling with its seed, and where that came from. Raises ApiError when there is none to be had."""
        if sampling.seed is not None:
            return sampling, "request"
        if sampling.temperature == 0:
            return sampling, "none"
        if self.policy == "derive":
            return dataclasses.replace(sampling, seed=derive_seed(prompt, sampling, grammar)), "derived"
        if self.arithmetic in ORDER_FREE:
            return dataclasses.replace(sampling, seed=self.draw()), "random"
        message = (
            f"seed: temperature {sampling.temperature} needs a seed in arithmetic {self.arithmetic!r}, for a draw "
            "without one cannot be repeated; send seed, set temperature to 0, or start the server with "
            "--default-seed-policy derive"
        )
        raise ApiError(400, message, "seed", "seed_required")


def derive_seed(prompt: tuple[int, ...], sampling: Sampling, grammar: Grammar | None = None) -> int:
    """The first 53 bits of SHA-256 over the prompt's ids and what shapes the distribution, grammar included."""
    content = {"derivation": DERIVATION, "prompt": prompt, **{name: getattr(sampling, name) for name in _SHAPING}}
    if grammar is not None:
        content["grammar"] = [grammar.kind, grammar.text]
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> (64 - SEED_BITS)
