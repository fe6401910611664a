"""A schedule: who runs with whom, and when. Arrivals are tied to engine steps or to other requests' progress.

It does not know prompts or engines. Rules: no wall clock; the order of arrivals is the order of submission; a
schedule names each request once.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """When one request is handed to the engine.

    With `after` None the request arrives once the engine has run `at_step` steps. Otherwise it arrives once request
    `after` has generated `after_tokens` tokens, or has finished when `after_tokens` is None; `at_step` is then 0.
    `cancel_after_tokens` takes a companion out once it has generated that many tokens; None lets it finish. `priority`
    counts for engines that run by priority: lower runs sooner; `rollback` for engines that leave it to each request
    whether it is decoded on a fast path and verified.
    """

    request: str
    companion: bool = False
    at_step: int = 0
    after: str | None = None
    after_tokens: int | None = None
    cancel_after_tokens: int | None = None
    priority: int = 0
    rollback: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """Arrivals in submission order. Companions run beside the judged requests and are never judged themselves."""

    name: str
    arrivals: tuple[Arrival, ...]
