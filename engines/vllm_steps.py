"""Writes down what vLLM's scheduler decides, step by step, from inside: which tokens of which request ran.

It does not know the harness. Rules: rows are the scheduler's own numbers; a step that schedules nothing is no step;
nothing is decided here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple


class Ran(NamedTuple):
    """In `step`, tokens [start, start + tokens) of a request were computed; `proposed` of them were drafts."""

    step: int
    request: str  # vLLM's internal id
    start: int
    tokens: int
    proposed: int


class StepLog:
    """Wraps `schedule` and `update_from_output` of one scheduler. `begin` forgets what was written so far."""

    def __init__(self, scheduler: Any) -> None:  # noqa: ANN401 - vLLM's scheduler
        self._schedule, self._update = scheduler.schedule, scheduler.update_from_output
        scheduler.schedule, scheduler.update_from_output = self._scheduled, self._updated
        self.ahead = 0  # steps that were scheduled while another one's results were still out, since the start
        self._in_flight = 0
        self.begin()

    def begin(self) -> None:
        """Starts a new work."""
        self.ran: list[Ran] = []
        self.steps = 0
        self.resumed: dict[str, int] = {}  # request to preemptions after which it ran again
        self.rollbacks: dict[str, int] = {}  # request to steps whose drafts were not all accepted

    def _scheduled(self, *arguments: Any, **options: Any) -> Any:  # noqa: ANN401 - vLLM's signature
        output = self._schedule(*arguments, **options)
        if output.total_num_scheduled_tokens:
            self.ahead += self._in_flight > 0
            self._in_flight += 1
            drafts = output.scheduled_spec_decode_tokens
            for request, start in _starts(output):
                count = output.num_scheduled_tokens[request]
                self.ran.append(Ran(self.steps, request, start, count, len(drafts.get(request, ()))))
            for request in output.scheduled_cached_reqs.resumed_req_ids:
                self.resumed[request] = self.resumed.get(request, 0) + 1
            self.steps += 1
        return output

    def _updated(self, output: Any, result: Any, *rest: Any, **options: Any) -> Any:  # noqa: ANN401 - as above
        if output.total_num_scheduled_tokens:
            self._in_flight -= 1
        for request, proposed in output.scheduled_spec_decode_tokens.items():
            tokens = result.sampled_token_ids[result.req_id_to_index[request]]
            self.rollbacks[request] = self.rollbacks.get(request, 0) + (len(tokens) - 1 < len(proposed))
        return self._update(output, result, *rest, **options)

    def drafted(self) -> Mapping[str, int]:
        """Request to proposed tokens that ran."""
        totals: dict[str, int] = {}
        for ran in self.ran:
            totals[ran.request] = totals.get(ran.request, 0) + ran.proposed
        return totals


def _starts(output: Any) -> Iterator[tuple[str, int]]:  # noqa: ANN401 - vLLM's SchedulerOutput
    """Every scheduled request with the number of its tokens that were computed before, in the batch's order."""
    for new in output.scheduled_new_reqs:
        yield new.req_id, new.num_computed_tokens
    cached = output.scheduled_cached_reqs
    yield from zip(cached.req_ids, cached.num_computed_tokens, strict=True)
