"""From raw logits to positions: transformers' own logits processors, then argmax or a draw.

It does not know batches. Rules: a row and its request decide the pick; reported logprobs are those of the raw float32
logits; transformers itself has one generator per process, which would tie a draw to the batch, so each request gets a
generator of its own, seeded with its seed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from engines.offline_traces import Answer, Position, rank
from harness.errors import EngineError
from harness.request import Request, Sampling

# What refuse_features may let through; transformers has neither frequency nor presence penalties.
OFFERED = frozenset({"draws", "min_p", "min_tokens", "repetition_penalty", "logit_bias", "stop_token_ids"})


class Sampler:
    """One request's way from logits to tokens, along its golden path if it has one."""

    def __init__(
        self, answer: Answer, eos_ids: Sequence[int], golden: tuple[int, ...] | None, *, digests: bool
    ) -> None:
        """`eos_ids` are the model's; `golden` what the request is forced along."""
        self.answer, self.golden, self._digests = answer, golden, digests
        sampling = answer.request.sampling
        self.stop_ids = frozenset(sampling.stop_token_ids) | frozenset(() if sampling.ignore_eos else eos_ids)
        self._processors = _processors(answer.request, sorted(self.stop_ids))
        self._generator = torch.Generator()
        if sampling.seed is not None:
            self._generator.manual_seed(sampling.seed)
        self._ids = torch.tensor([answer.request.prompt_token_ids])

    @property
    def most(self) -> int:
        """Positions the request has at most."""
        return self.answer.request.sampling.max_tokens if self.golden is None else len(self.golden)

    def take(self, logits: torch.Tensor, now: float) -> int:
        """Takes the next token from raw float32 logits (vocab,); ends the answer where it ends. Raises EngineError."""
        row, index = logits.detach().float().cpu(), len(self.answer.positions)
        if not bool(torch.isfinite(row).all()):
            raise EngineError(f"request {self.answer.request.id!r} position {index}: a logit is not a finite number")
        pick = self._pick(row)
        token = pick if self.golden is None else self.golden[index]
        self.answer.append(self._position(row, token, pick), now)
        self._ids = torch.cat([self._ids, torch.tensor([[token]])], dim=-1)
        reason = self._reason(token)
        if reason:
            self.answer.end(reason, now)
        return token

    def _pick(self, row: torch.Tensor) -> int:
        scores = row[None].clone()
        for process in self._processors:
            scores = process(self._ids, scores)
        if self.answer.request.sampling.temperature == 0:
            return int(scores[0].argmax())
        return int(torch.multinomial(torch.softmax(scores[0], -1), 1, generator=self._generator))

    def _position(self, row: torch.Tensor, token: int, pick: int) -> Position:
        logprobs = torch.log_softmax(row, -1).numpy()
        ids, values = rank(logprobs, self.answer.request.sampling.logprobs)
        digest = hashlib.blake2b(row.numpy().tobytes(), digest_size=16).digest() if self._digests else None
        return Position(token, pick, np.float32(logprobs[token]), ids.tolist(), values, digest)

    def _reason(self, token: int) -> str | None:
        generated = len(self.answer.positions)
        if self.golden is not None and generated < len(self.golden):
            return None
        if token in self.stop_ids and generated >= self.answer.request.sampling.min_tokens:
            return "stop"
        return "length" if generated >= self.most else None


def _processors(request: Request, stop_ids: list[int]) -> list[Any]:
    """transformers' processors and warpers, in the order in which `generate` applies them."""
    from transformers.generation import logits_process as made

    sampling: Sampling = request.sampling
    found: list[Any] = []
    if sampling.logit_bias:
        found.append(made.SequenceBiasLogitsProcessor([[[token], float(bias)] for token, bias in sampling.logit_bias]))
    if sampling.repetition_penalty != 1.0:
        found.append(made.RepetitionPenaltyLogitsProcessor(penalty=sampling.repetition_penalty))
    if sampling.min_tokens and stop_ids:
        prompt = len(request.prompt_token_ids)
        found.append(made.MinNewTokensLengthLogitsProcessor(prompt, sampling.min_tokens, stop_ids))
    if sampling.temperature == 0:
        return found
    found.append(made.TemperatureLogitsWarper(float(sampling.temperature)))
    if sampling.top_k:
        found.append(made.TopKLogitsWarper(top_k=sampling.top_k))
    if sampling.top_p < 1.0:
        found.append(made.TopPLogitsWarper(top_p=float(sampling.top_p)))
    if sampling.min_p > 0.0:
        found.append(made.MinPLogitsWarper(min_p=float(sampling.min_p)))
    return found
