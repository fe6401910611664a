"""Runs one work of the harness on the bundled engine and writes its traces. It knows no model and no kernels.

Rules: features this engine lacks are refused before anything runs; requests keep the schedule's order in the
traces; the steps are those the engine wrote down; times are kept beside and never compared.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from engines.arrivals import Arrivals, Standing
from engines.bundled.engine import Engine
from engines.bundled.errors import NotSupported, RequestError
from engines.bundled.request import Grammar, Request, Sampling
from engines.bundled.sequence import Sequence
from engines.bundled_traces import Row, write_traces
from harness.engine import Progress, Work
from harness.request import Request as HarnessRequest
from harness.traces import Traces


@dataclass(slots=True, kw_only=True)
class _Submitted:
    """One request under way: its sequences, one per sample, and when things happened, in seconds from the start."""

    sequences: list[Sequence]
    companion: bool
    arrival_s: float
    cancel_after: int | None  # tokens after which it is taken out
    later: list[Request] = field(default_factory=list)  # samples that wait for the one before them
    cancelled: bool = False
    first_token_s: dict[int, float] = field(default_factory=dict)  # sample to time
    finish_s: dict[int, float] = field(default_factory=dict)

    @property
    def standing(self) -> Standing:
        """How far the slowest sample is."""
        return Standing(
            generated=min(sequence.generated for sequence in self.sequences),
            finished=self.cancelled
            or (not self.later and all(sequence.finish_reason is not None for sequence in self.sequences)),
        )

    @property
    def is_due_to_leave(self) -> bool:
        """True once it has generated as much as it may."""
        standing = self.standing
        return self.cancel_after is not None and not standing.finished and standing.generated >= self.cancel_after


def run_work(engine: Engine, work: Work, progress: Progress, *, samples: str = "together") -> Traces:
    """Runs the work to its end. `samples` "separate": each sample of a request waits for the one before it.

    Raises:
        NotSupported: an image, or golden replay of several samples.
        RequestError: a request that cannot be run as written.
        ComputeError: logits that are no numbers.
        EngineError: a schedule that can never complete.
    """
    requests = {one.id: one for one in work.requests}
    if len(requests) != len(work.requests):
        ids = [one.id for one in work.requests]
        raise RequestError(f"request id {next(i for i in ids if ids.count(i) > 1)!r} is given twice")
    prepared = prepare(work, requests)
    for name in sorted(prepared):
        for request in prepared[name]:
            engine.check(request)
    arrivals = Arrivals(work.schedule, requests)
    try:
        submitted = _run(engine, arrivals, prepared, progress, samples)
        engine.check_pages()
        rows = [row for arrival in work.schedule.arrivals for row in _rows(submitted[arrival.request])]
        return write_traces(engine, rows)
    finally:
        engine.reset()


def _run(
    engine: Engine, arrivals: Arrivals, prepared: Mapping[str, list[Request]], progress: Progress, samples: str
) -> dict[str, _Submitted]:
    start = time.perf_counter()
    submitted: dict[str, _Submitted] = {}
    while arrivals.pending or engine.has_work:
        standings = {name: entry.standing for name, entry in submitted.items()}
        for arrival in arrivals.take_due(engine.step_index, standings):
            now = prepared[arrival.request] if samples == "together" else prepared[arrival.request][:1]
            sequences = [engine.submit(request) for request in now]
            submitted[arrival.request] = _Submitted(
                sequences=sequences, companion=arrival.companion, arrival_s=time.perf_counter() - start,
                cancel_after=arrival.cancel_after_tokens, later=prepared[arrival.request][len(now) :],
            )  # fmt: skip
        _continue_samples(engine, submitted)
        if not engine.has_work:
            engine.idle_until(arrivals.next_step())
            continue
        engine.step()
        _cancel(engine, submitted)
        _note_times(submitted, time.perf_counter() - start)
        progress(*_totals(submitted))
    return submitted


def _continue_samples(engine: Engine, submitted: Mapping[str, _Submitted]) -> None:
    """Submits the next sample of each request whose samples so far are over."""
    for entry in submitted.values():
        if entry.later and all(sequence.finish_reason is not None for sequence in entry.sequences):
            entry.sequences.append(engine.submit(entry.later.pop(0)))


def _cancel(engine: Engine, submitted: Mapping[str, _Submitted]) -> None:
    for name, entry in submitted.items():
        if entry.is_due_to_leave:
            engine.abort(name)
            entry.cancelled = True


def _note_times(submitted: Mapping[str, _Submitted], now: float) -> None:
    for entry in submitted.values():
        for sample, sequence in enumerate(entry.sequences):
            if sequence.generated:
                entry.first_token_s.setdefault(sample, now)
            if sequence.finish_reason is not None or entry.cancelled:
                entry.finish_s.setdefault(sample, now)


def _totals(submitted: Mapping[str, _Submitted]) -> tuple[int, int]:
    """(requests finished, tokens generated)."""
    finished = sum(entry.standing.finished for entry in submitted.values())
    return finished, sum(sequence.generated for entry in submitted.values() for sequence in entry.sequences)


def _rows(entry: _Submitted) -> list[Row]:
    return [
        Row(
            sequence=sequence,
            companion=entry.companion,
            arrival_s=entry.arrival_s,
            first_token_s=entry.first_token_s[sample],
            finish_s=entry.finish_s[sample],
        )
        for sample, sequence in enumerate(entry.sequences)
    ]


def prepare(work: Work, requests: Mapping[str, HarnessRequest]) -> dict[str, list[Request]]:
    """The engine's requests by id, one per sample. Companions without a golden path run freely.

    Raises NotSupported, RequestError.
    """
    companions = {arrival.request for arrival in work.schedule.arrivals if arrival.companion}
    _refuse_cancelled(work)
    planned = {arrival.request: arrival for arrival in work.schedule.arrivals}
    prepared: dict[str, list[Request]] = {}
    for name, request in requests.items():
        _refuse_unsupported(request)
        forced = work.golden.get(name) if work.replay == "golden" else None
        if work.replay == "golden" and forced is None and name not in companions:
            raise RequestError(f"request {name!r}: golden replay was asked for, but no golden path was given")
        if forced is not None and request.sampling.n > 1:
            raise NotSupported(f"request {name!r}: golden replay of n = {request.sampling.n} samples; use n = 1")
        prepared[name] = [
            Request(
                id=name,
                prompt=request.prompt_token_ids,
                sampling=_sampling(request),
                grammar=_grammar(request),
                sample=sample,
                forced=forced,
                logits_digest=work.logits_digests,
                priority=planned[name].priority if name in planned else 0,
                rollback=name in planned and planned[name].rollback,
            )
            for sample in range(request.sampling.n)
        ]
    return prepared


def _refuse_cancelled(work: Work) -> None:
    for arrival in work.schedule.arrivals:
        if arrival.cancel_after_tokens is None:
            continue
        if not arrival.companion or arrival.cancel_after_tokens < 1:
            raise RequestError(
                f"request {arrival.request!r}: cancel_after_tokens {arrival.cancel_after_tokens}: expected 1 or more, "
                "and a companion: what is cut off is not judged"
            )


def _refuse_unsupported(request: HarnessRequest) -> None:
    if request.images:
        raise NotSupported(f"request {request.id!r}: {len(request.images)} image(s); this engine reads text alone")
    if request.sampling.n < 1:
        raise RequestError(f"request {request.id!r}: n: expected 1 or more, got {request.sampling.n}")


def _grammar(request: HarnessRequest) -> Grammar | None:
    grammar = request.grammar
    return None if grammar is None else Grammar(kind=grammar.kind, text=grammar.text)


def _sampling(request: HarnessRequest) -> Sampling:
    sampling = request.sampling
    return Sampling(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
        frequency_penalty=sampling.frequency_penalty,
        presence_penalty=sampling.presence_penalty,
        seed=sampling.seed,
        max_tokens=sampling.max_tokens,
        min_tokens=sampling.min_tokens,
        ignore_eos=sampling.ignore_eos,
        stop=sampling.stop,
        stop_token_ids=sampling.stop_token_ids,
        logit_bias=sampling.logit_bias,
        logprobs=sampling.logprobs,
    )
