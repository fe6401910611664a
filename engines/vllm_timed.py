"""Serves requests on a vLLM engine by the clock: the session behind `harness.engine.Timed`.

It does not know loads or latencies. Rules: one `advance` is one step of the engine in this process, and what came out
carries the time at which the step returned; sampling is handed over as in untimed works.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from engines.vllm_steps import StepLog
from engines.vllm_work import Able, Served, check, parameters_of, submit
from harness.engine import Emission, Work
from harness.errors import EngineDied, EngineError
from harness.request import Request
from harness.schedule import Arrival, Schedule
from harness.traces import Traces

LONGEST_NAP_S = 0.25
MOST_EMPTY_STEPS = 10_000  # in a row, though requests wait


class VllmSession:
    """One timed serving; implements `harness.engine.TimedSession`."""

    def __init__(
        self, engine: Any, steps: StepLog, requests: Sequence[Request], able: Able,  # noqa: ANN401 - LLMEngine
        write: Callable[[Sequence[Served]], Traces],
    ) -> None:  # fmt: skip
        """`write` makes traces of what was served. Raises Unsupported, EngineError for what cannot run as written."""
        self._engine, self._steps, self._write = engine, steps, write
        nobody = Schedule(name="by the clock", arrivals=())
        work = Work(requests=tuple(requests), schedule=nobody, replay="natural", golden={}, logits_digests=False)
        for request in requests:
            check(request, able)
        self._prepared = {one.id: (one, parameters_of(one, Arrival(request=one.id), work, able)) for one in requests}
        self._served: dict[str, Served] = {}
        self._told: dict[str, int] = {}
        self._empty = 0
        steps.begin()
        self._began = time.perf_counter()

    def now(self) -> float:
        """Seconds since the session was opened."""
        return time.perf_counter() - self._began

    def submit(self, request: str) -> None:
        """Hands a request to vLLM. Raises EngineError if it is unknown or was submitted before, Unsupported."""
        found = self._prepared.pop(request, None)
        if found is None:
            raise EngineError(f"request {request!r}: not opened in this session, or submitted twice")
        one, parameters = found
        internal = submit(self._engine, one, parameters, len(self._served), priority=0)
        arrival = Arrival(request=one.id)
        self._served[one.id] = Served(request=one, arrival=arrival, internal=internal, arrival_s=self.now())
        self._told[one.id] = 0

    def advance(self, until_s: float | None) -> list[Emission]:
        """One step; without work, sleep towards `until_s`. Raises EngineDied, EngineError."""
        if not self._engine.has_unfinished_requests():
            wait = LONGEST_NAP_S if until_s is None else min(until_s - self.now(), LONGEST_NAP_S)
            if wait > 0:
                time.sleep(wait)
            return []
        before = self._steps.steps
        try:
            outputs = self._engine.step()
        except Exception as error:
            raise EngineDied(f"vLLM failed in a step: {type(error).__name__}: {error}") from error
        self._empty = self._empty + 1 if self._steps.steps == before else 0
        if self._empty > MOST_EMPTY_STEPS:
            raise EngineError("vLLM schedules nothing although requests wait; is the KV cache too small?")
        now = self.now()
        return [self._tell(output, now) for output in outputs]

    def finish(self) -> Traces:
        """The traces of everything submitted."""
        return self._write(list(self._served.values()))

    def _tell(self, output: Any, now: float) -> Emission:  # noqa: ANN401 - RequestOutput
        served = self._served[output.request_id]
        served.output = output
        count = len(output.outputs[0].token_ids)  # cumulative
        fresh, self._told[output.request_id] = count - self._told[output.request_id], count
        if fresh and served.first_token_s == 0.0:
            served.first_token_s = now
        if output.finished:
            served.finish_s = now
        return Emission(request=output.request_id, sample=0, tokens=fresh, finished=bool(output.finished), at_s=now)
