"""What one server serves: a started engine, its thread, its name and its fingerprint. It knows no routes.

Rules: the engine is touched by its thread alone; while the server drains, new orders are refused and those under way
go on.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

from engines.bundled_lifetime import BundledLifetime
from engines.serve.answers import Head
from engines.serve.bridge import Bridge
from engines.serve.errors import ApiError
from engines.serve.exchange import Exchange
from engines.serve.identity import read_fingerprint
from engines.serve.orders import Kitchen, Order
from engines.serve.seeds import Seeding
from harness.engine import Scalar
from harness.fingerprint import Fingerprint

STOP_TIMEOUT_S = 60.0  # longer than any one step


@dataclass(slots=True, kw_only=True, eq=False)
class Service:
    """One engine and everything a route needs of it."""

    lifetime: BundledLifetime
    requested: Mapping[str, Scalar]
    kitchen: Kitchen
    bridge: Bridge
    digest: str
    started: int  # seconds since 1970
    draining: bool = False
    under_way: int = 0  # orders

    def begin(self, order: Order) -> Exchange:
        """Puts an order on the engine. Raises ApiError 503 if the server is ending or the engine broke."""
        if self.draining:
            raise ApiError(503, "the server is shutting down", None, "shutting_down")
        if self.bridge.broken is not None:
            raise ApiError(503, self.bridge.broken, None, "engine_error")
        return Exchange(order, self.bridge, self.lifetime.tokenizer, frozenset(self.kitchen.model.eos_token_ids))

    def head(self) -> Head:
        """The beginning of an answer given now."""
        return Head(model=self.kitchen.model_name, created=int(time.time()), fingerprint=self.digest)

    def fingerprint(self) -> Fingerprint:
        """The whole record, read now."""
        served = self.bridge.counts.admitted
        return read_fingerprint(self.lifetime, self.requested, os.environ, datetime.now(UTC), served)


def open_service(lifetime: BundledLifetime, requested: Mapping[str, Scalar], seeding: Seeding) -> Service:
    """A service over a started engine; its thread is not started yet."""
    kitchen = Kitchen(
        model_name=lifetime.model_name,
        model=lifetime.engine.model,
        engine=lifetime.engine.config,
        tokenizer=lifetime.tokenizer,
        seeding=seeding,
        grammars=lifetime.engine.grammars,
    )
    record = read_fingerprint(lifetime, requested, os.environ, datetime.now(UTC), 0)
    return Service(
        lifetime=lifetime,
        requested=requested,
        kitchen=kitchen,
        bridge=Bridge(lifetime.engine),
        digest=record.digest,
        started=int(time.time()),
    )
