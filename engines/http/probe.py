"""Asks an endpoint, by trying, what evidence it offers and whether it obeys seeds. It does not know cells.

Rules: three short requests, sent before anything is judged and counted among what the server has served; what is
found lowers what may be claimed, and is said in words; a refused seed is an answer, not a failure.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from engines.http.answer import Offer
from engines.http.client import Client, EndpointError
from engines.http.dialect import Dialect, Prompt
from engines.http.exchange import Exchange, open_exchange, refuse_other_identity, run_exchange
from harness.engine import Rule
from harness.request import Message, Request, Sampling

TOKENS = 16
SEEDS = (20231, 20231, 20232)
WORDS = "Once upon a time, in a town by the sea, there lived"
Obedience = Literal["obeyed", "ignored", "refused"]
_BAD_REQUEST = (400, 422)


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What an endpoint offers. `seeds_reason` says why seeds are not obeyed, empty where they are."""

    offer: Offer
    seeds: Obedience
    seeds_reason: str
    fingerprints: frozenset[str]
    identity: str = ""  # the digest in the answers' header, where the server sends one

    @property
    def rule(self) -> Rule:
        """The strongest rule the evidence allows."""
        if not self.offer.logprobs:
            return "tokens" if self.offer.naming != "text" else "text"
        return "topk" if self.offer.topk else "logprobs"

    @property
    def rule_reason(self) -> str:
        """Why no stronger rule: what the answers lack."""
        lacking = {
            "text": "token ids, token texts and logprobs",
            "tokens": "logprobs",
            "logprobs": "top candidates that can be told apart",
            "topk": "logits",
        }
        return f"the endpoint's answers carry no {lacking[self.rule]}"


def probe_request(prompt_ids: tuple[int, ...], seed: int | None) -> Request:
    """A short seeded draw with candidates."""
    sampling = Sampling(
        temperature=1.0, top_p=1.0, top_k=0, min_p=0.0, repetition_penalty=1.0, frequency_penalty=0.0,
        presence_penalty=0.0, seed=seed, max_tokens=TOKENS, min_tokens=0, ignore_eos=False, stop=(),
        stop_token_ids=(), logit_bias=(), logprobs=2, n=1,
    )  # fmt: skip
    return Request(
        id=f"probe with seed {seed}", prompt_token_ids=prompt_ids, text=WORDS,
        messages=(Message(role="user", content=WORDS),), sampling=sampling, grammar=None, images=(),
    )  # fmt: skip


async def probe(client: Client, dialect: Dialect, model: str, prompt: Prompt) -> Found:
    """Sends the probes one after another. Raises EngineError for an endpoint that answers none of them."""
    tried: list[Exchange] = []
    refused = ""
    for seed in SEEDS:
        exchange = _exchange(dialect, model, prompt, seed)
        try:
            await run_exchange(client, exchange, None, lambda: None)
        except EndpointError as error:
            if error.status not in _BAD_REQUEST or tried:
                raise
            refused = str(error)
            break
        tried.append(exchange)
    if refused:
        bare = _exchange(dialect, model, prompt, None)
        await run_exchange(client, bare, None, lambda: None)  # another refusal is about something else
        tried.append(bare)
    identity = tried[0].identity
    refuse_other_identity(tried, identity)
    obedience, reason = _refusal(refused) if refused else _obedience(tried)
    return Found(
        offer=tried[0].answers[0].offer, seeds=obedience, seeds_reason=reason,
        fingerprints=frozenset(name for one in tried for name in one.fingerprints), identity=identity,
    )  # fmt: skip


def _exchange(dialect: Dialect, model: str, prompt: Prompt, seed: int | None) -> Exchange:
    request = probe_request(prompt.ids or (), seed)
    return open_exchange(dialect, request, prompt, model, companion=False, leave_after=None)


def _refusal(why: str) -> tuple[Obedience, str]:
    return "refused", f"a seed is refused: {why}"


def _obedience(tried: list[Exchange]) -> tuple[Obedience, str]:
    first, again, other = (one.answers[0].tokens for one in tried)
    if first != again:
        at = next(
            (i for i, (a, b) in enumerate(zip(first, again, strict=False)) if a != b), min(len(first), len(again))
        )
        return "ignored", f"two draws with the same seed differ from token {at} on"
    if first == other:
        return "ignored", f"two draws of {len(first)} tokens with different seeds are the same"
    return "obeyed", ""
