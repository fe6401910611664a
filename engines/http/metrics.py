"""A server's metrics page, and samples of it while requests run. It judges nothing.

Rules: a family's samples are added over its labels; a page that is not there is no number, and never zero. Format:
Prometheus text, version 0.0.4.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from engines.http.client import Client, EndpointError
from engines.http.flavours import Flavour

EVERY_S = 0.2  # between samples of a run; a page may be long and slow to make


def read_metric(page: str, name: str) -> float | None:
    """The sum of a family's samples; None where the page has none, or no number."""
    total: float | None = None
    for line in page.splitlines():
        head, _, value = line.rpartition(" ")
        if head == name or head.startswith(name + "{"):
            try:
                total = (total or 0.0) + float(value)
            except ValueError:
                return None
    return total


def read_labels(page: str, name: str) -> dict[str, str]:
    """The labels of a family's first sample, for pages that tell a configuration in labels."""
    for line in page.splitlines():
        if line.startswith(name + "{"):
            inside = line[len(name) + 1 : line.rfind("}")]
            pairs = (part.partition('="') for part in inside.split('",'))
            return {key.strip(", "): value.rstrip('"') for key, _, value in pairs if key.strip(", ")}
    return {}


@dataclass(slots=True, kw_only=True)
class Samples:
    """What was seen of the metrics during one work."""

    running: list[float] = field(default_factory=list)
    cached: list[float] = field(default_factory=list)

    def counters(self) -> dict[str, int]:
        """Integers for a capture; empty where there is no page."""
        found = {"metrics_samples": len(self.running)}
        if self.running:
            found["server_running_max"] = int(max(self.running))
        if len(self.cached) > 1:
            found["server_cached_tokens"] = int(self.cached[-1] - self.cached[0])
        return found

    @property
    def never_together(self) -> bool:
        """True where the server was seen often enough and never with two requests at once."""
        return len(self.running) >= ENOUGH and max(self.running) <= 1


ENOUGH = 10  # samples from which on never having seen two counts


@asynccontextmanager
async def sampled(client: Client, flavour: Flavour) -> AsyncIterator[Samples]:
    """Samples the metrics page while the block runs, once at its begin and once at its end."""
    samples = Samples()
    if not flavour.metrics:
        yield samples
        return
    await _sample(client, flavour, samples)
    task = asyncio.create_task(_keep_sampling(client, flavour, samples))
    try:
        yield samples
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
    await _sample(client, flavour, samples)


async def _keep_sampling(client: Client, flavour: Flavour, samples: Samples) -> None:
    while await _sample(client, flavour, samples):
        await asyncio.sleep(EVERY_S)


async def _sample(client: Client, flavour: Flavour, samples: Samples) -> bool:
    """One sample; False where there is no such page, which is no error: metrics are evidence, not an answer."""
    try:
        page = (await client.get(flavour.metrics)).decode(errors="replace")
    except EndpointError:
        return False
    for name, into in ((flavour.running, samples.running), (flavour.cached, samples.cached)):
        value = read_metric(page, name) if name else None
        if value is not None:
            into.append(value)
    return True
