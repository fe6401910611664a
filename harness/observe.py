"""Starts an engine once, only to ask what it resolved and observes. The engine runs in a child process and is stopped.

It does not know cells. Rules: the child answers for itself; nothing is inferred from what was asked.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from harness import registry
from harness.engine import Field, Scalar
from harness.errors import EngineError, Unsupported
from harness.fingerprint.variables import NOT_SET
from harness.lifetime import DEADLINE_S, LifetimeError, LifetimeProcess
from harness.settings import resolve

PREFIX = "env."


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """What an engine was asked for, settled on and shows."""

    requested: Mapping[str, Scalar]
    resolved: Mapping[str, Scalar]
    observed: Mapping[str, Scalar]
    subject: tuple[Field, ...]


def observe(engine: str, model: str, settings: Mapping[str, Scalar]) -> Observation:
    """Starts the engine with a model and settings over its defaults. Raises EngineError, Unsupported, UsageError."""
    adapter = registry.adapter(engine)
    requested = dict(resolve(adapter, [("settings", settings)]))
    adapter.model_facts(model)
    environment = adapter.environment(requested)
    with tempfile.TemporaryDirectory(prefix="samebits-") as folder:
        try:
            with LifetimeProcess(environment, Path(folder) / "engine.log") as process:
                started = process.ask(
                    {"do": "start", "engine": engine, "model": model, "settings": requested, "store": folder,
                     "session": "observe"}, DEADLINE_S,
                )  # fmt: skip
        except LifetimeError as error:
            kind = Unsupported if error.failure.kind == "unsupported" else EngineError
            raise kind("\n".join([error.failure.message, *error.failure.log_tail])) from error
    rows = cast("list[dict[str, object]]", started["subject"])
    return Observation(
        requested=requested,
        resolved=cast("Mapping[str, Scalar]", started["resolved"]),
        observed=cast("Mapping[str, Scalar]", started["observed"]),
        subject=tuple(Field(**row) for row in rows),  # type: ignore[arg-type]
    )


def worker_environment(observation: Observation) -> dict[str, str]:
    """The variables that affect numerics as the engine's own process read them; those not set are left out."""
    return {
        field.name.removeprefix(PREFIX): str(field.value)
        for field in observation.subject
        if field.name.startswith(PREFIX) and field.value not in (None, NOT_SET)
    }


def subject_fields(engine: str, model: str, settings: Mapping[str, Scalar]) -> tuple[Field, ...]:
    """The subject's whole fingerprint, read in the engine's own process."""
    return observe(engine, model, settings).subject
