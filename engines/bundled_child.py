"""A bundled engine in a process of its own, for engines that consist of several: replicas, prefill beside decode.

It does not know what for. Rules: the process is the harness's own engine process, with its deadlines, its log and its
end when the parent is gone; an error names the role of the process and shows the end of its log.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import cast

from harness.corpus.json_lines import request_json
from harness.engine import Field, Scalar, Work
from harness.errors import EngineError, Unsupported
from harness.lifetime import Event, LifetimeError, LifetimeProcess
from harness.request import Request
from harness.store import Store
from harness.traces import Traces

DEADLINE_S = 600.0  # for one answer
TAIL_LINES = 8


class ChildEngine:
    """One started engine process."""

    def __init__(
        self, role: str, model: str, settings: Mapping[str, Scalar], environment: Mapping[str, str], folder: Path,
        deadline_s: float = DEADLINE_S,
    ) -> None:  # fmt: skip
        """Starts it; captures and log lie in `folder`. Raises EngineError, Unsupported, both naming `role`."""
        self.role = role
        self._deadline_s = deadline_s
        self._store = Store(folder / "captures")
        self._process = LifetimeProcess(environment, folder / "engine.log")
        self._process.__enter__()
        command = {"do": "start", "engine": "bundled", "model": model, "settings": dict(settings),
                   "store": str(self._store.folder), "session": role}  # fmt: skip
        try:
            started = self._ask(command)
        except BaseException:
            self.close()
            raise
        self.resolved = cast("Mapping[str, Scalar]", started["resolved"])
        self.subject = tuple(Field(**row) for row in cast("Sequence[dict[str, object]]", started["subject"]))  # type: ignore[arg-type]

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def generate(self, work: Work) -> Traces:
        """Runs a work and reads what it left in the store. Raises EngineError, Unsupported."""
        case = "0" * 16
        self._store.remove(case)
        self._ask(
            {"do": "capture", "case": case, "requests": [request_json(request) for request in work.requests],
             "schedule": dataclasses.asdict(work.schedule), "replay": work.replay,
             "golden": {name: list(path) for name, path in work.golden.items()},
             "logits_digests": work.logits_digests, "work": {}, "prelude": [], "cache": None,
             "reset": False},
        )  # fmt: skip
        return self._store.read(case).traces

    def save(self, requests: Sequence[Request], folder: Path) -> None:
        """Serves requests and leaves what it computed in `folder`. Raises EngineError, Unsupported."""
        prelude = [request_json(request) for request in requests]
        self._ask({"do": "save", "prelude": prelude, "cache": str(folder)})

    def close(self) -> None:
        """Ends the process."""
        self._process.__exit__(None, None, None)

    def _ask(self, command: Mapping[str, object]) -> Event:
        try:
            return self._process.ask(command, self._deadline_s)
        except LifetimeError as error:
            kind = Unsupported if error.failure.kind == "unsupported" else EngineError
            tail = error.failure.log_tail[-TAIL_LINES:]
            raise kind("\n  ".join([f"{self.role}: {error.failure.message}", *tail])) from error
