"""Lifetimes and cases: the units that are run. A case is identified by its content.

It does not know cells or how a case is run. Rules: equal content means equal id, so cells share cases; a repetition
or another lifetime is another case.
"""

from __future__ import annotations

from dataclasses import dataclass

from harness.canonical import digest
from harness.engine import Replay
from harness.schedule import Schedule
from harness.settings import Settings

RESET = "reset before each case: "  # begins the purpose of a lifetime whose cache is emptied before each case


@dataclass(frozen=True, slots=True, kw_only=True)
class Lifetime:
    """One engine process: a configuration, an ordinal that tells restarts of it apart, and a purpose.

    A purpose other than "" keeps the process to cases that need a fresh one (caches and history are the axis), or,
    when it is a reset, to the cases of one cache axis, each after the cache was emptied.
    """

    engine: str
    model: str
    settings: Settings
    ordinal: int
    purpose: str = ""

    @property
    def id(self) -> str:
        """Sixteen hexadecimal digits of the content's SHA-256."""
        return digest(self)[:16]

    @property
    def resets(self) -> bool:
        """Whether the prefix cache is emptied before each case."""
        return self.purpose.startswith(RESET)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Engine configuration, schedule, requests, lifetime and repetition.

    `prelude` is (kind, digest of its requests) of what the engine serves just before, or None.
    `golden` is the id of the case whose tokens the requests are forced along (golden replay), else None.
    `seed_offset` is added to every request's seed, modulo 2**64. `companions` are (corpus, count) to run beside.
    """

    lifetime: Lifetime
    corpus: str
    corpus_digest: str
    requests: tuple[str, ...]
    companions: tuple[str, str, int] | None  # corpus, its digest, count
    schedule: Schedule
    prelude: tuple[str, str] | None
    replay: Replay
    golden: str | None
    repetition: int
    seed_offset: int
    logits_digests: bool

    @property
    def id(self) -> str:
        """Sixteen hexadecimal digits of the content's SHA-256."""
        return digest(self)[:16]
