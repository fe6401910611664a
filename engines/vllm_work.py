"""Runs one work of the harness on a vLLM engine, step by step, and keeps what came out. It judges nothing.

Rules: what vLLM cannot do is refused before anything runs; arrivals follow the scheduler's steps and the requests' own
progress; every sampling field is handed over explicitly; an exception out of a step means that the engine is gone.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engines.arrivals import Arrivals, Standing
from engines.vllm_config import GOLDEN, MOST_LOGPROBS
from engines.vllm_steps import StepLog
from harness.engine import Progress, Work
from harness.errors import EngineDied, EngineError, Unsupported
from harness.request import Request
from harness.schedule import Arrival

MOST_IDLE_STEPS = 10_000  # steps in a row that schedule nothing although requests wait
SEEDS = 2**63  # vLLM keeps seeds as signed 64-bit integers; one beyond them ends its newer model runner
MOST_BIAS = 100.0  # vLLM clamps beyond it without a word


@dataclass(slots=True, kw_only=True)
class Served:
    """One request under way. Times are seconds from the work's start."""

    request: Request
    arrival: Arrival
    internal: str  # vLLM's id
    arrival_s: float
    output: Any = None  # the newest RequestOutput, which holds everything so far
    cancelled: bool = False
    first_token_s: float = 0.0
    finish_s: float = 0.0

    @property
    def tokens(self) -> list[int]:
        """Output tokens so far."""
        return list(self.output.outputs[0].token_ids) if self.output is not None else []

    @property
    def standing(self) -> Standing:
        """How far it is."""
        finished = self.cancelled or (self.output is not None and self.output.finished)
        return Standing(generated=len(self.tokens), finished=finished)


@dataclass(frozen=True, slots=True, kw_only=True)
class Able:
    """What the started engine can do beyond sampling, with the reason where it cannot."""

    golden: str | None  # why golden replay is refused; None: it works
    trace: bool  # golden tokens go to vLLM's own trace replay
    text: bool  # there is a tokenizer, so stop strings work
    max_model_len: int


def run_work(engine: Any, steps: StepLog, work: Work, able: Able, progress: Progress) -> list[Served]:  # noqa: ANN401
    """Runs the work to its end; served requests in the schedule's order.

    Raises:
        Unsupported: a feature this engine lacks.
        EngineError: a request that cannot run, or a schedule that can never complete.
        EngineDied: vLLM failed while it ran.
    """
    requests = {request.id: request for request in work.requests}
    for request in work.requests:
        check(request, able)
    parameters = {arrival.request: parameters_of(requests[arrival.request], arrival, work, able)
                  for arrival in work.schedule.arrivals}  # fmt: skip
    arrivals = Arrivals(work.schedule, requests)
    served: dict[str, Served] = {}
    steps.begin()
    try:
        _run(engine, steps, arrivals, requests, parameters, served, progress)
    except EngineDied:
        raise
    except EngineError:  # the engine goes on, so nothing of this work may stay in it
        engine.abort_request([name for name, entry in served.items() if not entry.standing.finished])
        raise
    return [served[arrival.request] for arrival in work.schedule.arrivals]


def _run(
    engine: Any,  # noqa: ANN401 - vLLM's LLMEngine
    steps: StepLog,
    arrivals: Arrivals,
    requests: Mapping[str, Request],
    parameters: Mapping[str, Any],
    served: dict[str, Served],
    progress: Progress,
) -> None:
    begun, idled, empty = time.perf_counter(), 0, 0
    while arrivals.pending or engine.has_unfinished_requests():
        standings = {name: entry.standing for name, entry in served.items()}
        for arrival in arrivals.take_due(steps.steps + idled, standings):
            request = requests[arrival.request]
            internal = submit(engine, request, parameters[request.id], len(served), priority=arrival.priority)
            served[request.id] = Served(
                request=request, arrival=arrival, internal=internal, arrival_s=time.perf_counter() - begun
            )
        if not engine.has_unfinished_requests():
            idled = max(idled, arrivals.next_step() - steps.steps)
            continue
        before = steps.steps
        _step(engine, served, begun)
        empty = empty + 1 if steps.steps == before else 0
        if empty > MOST_IDLE_STEPS:
            waiting = sorted(name for name, entry in served.items() if not entry.standing.finished)
            raise EngineError(f"vLLM schedules nothing, but {', '.join(waiting[:5])} wait; is the KV cache too small?")
        progress(
            sum(entry.standing.finished for entry in served.values()),
            sum(entry.standing.generated for entry in served.values()),
        )


def submit(engine: Any, request: Request, parameters: Any, number: int, *, priority: int) -> str:  # noqa: ANN401
    """Hands a request over and returns vLLM's id. Raises Unsupported in vLLM's words."""
    prompt = {"prompt_token_ids": list(request.prompt_token_ids)}
    try:
        internal: str = engine.add_request(
            request.id, prompt, parameters, arrival_time=float(number), priority=priority
        )
    except _refusals() as error:
        raise Unsupported(f"request {request.id!r}: vLLM refuses it: {error}") from error
    return internal


def _refusals() -> tuple[type[Exception], ...]:
    """What vLLM's validation raises: ValueError, and since 0.32 a class of its own that is none."""
    module = sys.modules.get("vllm.exceptions")  # a vLLM that refuses something has imported it
    return ValueError, getattr(module, "VLLMValidationError", ValueError)


def _step(engine: Any, served: dict[str, Served], begun: float) -> None:  # noqa: ANN401
    try:
        outputs = engine.step()
    except Exception as error:
        raise EngineDied(f"vLLM failed in a step: {type(error).__name__}: {error}") from error
    now = time.perf_counter() - begun
    for output in outputs:
        entry = served[output.request_id]
        entry.output = output
        if entry.first_token_s == 0.0 and entry.tokens:
            entry.first_token_s = now
        if output.finished:
            entry.finish_s = now
        due = entry.arrival.cancel_after_tokens
        if due is not None and not output.finished and len(entry.tokens) >= due:
            engine.abort_request([entry.request.id])
            entry.cancelled, entry.finish_s = True, now


def check(request: Request, able: Able) -> None:
    """Raises Unsupported or EngineError for a request that cannot run as written."""
    name, sampling = f"request {request.id!r}", request.sampling
    if request.grammar is not None:
        raise Unsupported(f"{name}: a grammar ({request.grammar.kind}); this adapter passes none on")
    if request.images:
        raise Unsupported(f"{name}: {len(request.images)} image(s); this adapter passes text on alone")
    if sampling.n != 1:
        raise Unsupported(f"{name}: n = {sampling.n}; this adapter runs n = 1")
    if sampling.logprobs > MOST_LOGPROBS:
        raise Unsupported(f"{name}: {sampling.logprobs} top candidates; at most {MOST_LOGPROBS} are reported")
    if sampling.stop and not able.text:
        raise Unsupported(f"{name}: stop strings, and the model comes without a tokenizer")
    far = [token for token, bias in sampling.logit_bias if abs(bias) > MOST_BIAS]
    if far:
        raise Unsupported(f"{name}: the bias of token {far[0]} is beyond {MOST_BIAS:.0f}, where vLLM would clamp it")
    tokens = len(request.prompt_token_ids) + sampling.max_tokens
    if tokens > able.max_model_len:
        raise EngineError(
            f"{name}: {tokens} tokens of prompt and output, max_model_len is {able.max_model_len}; raise it"
        )


def parameters_of(request: Request, arrival: Arrival, work: Work, able: Able) -> Any:  # noqa: ANN401 - SamplingParams
    """vLLM's sampling parameters, every field that can move a bit set."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    sampling = request.sampling
    seed = None if sampling.seed is None else sampling.seed % SEEDS
    return SamplingParams(
        n=1, temperature=sampling.temperature, top_p=sampling.top_p, top_k=sampling.top_k, min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty, frequency_penalty=sampling.frequency_penalty,
        presence_penalty=sampling.presence_penalty, seed=seed, max_tokens=sampling.max_tokens,
        min_tokens=sampling.min_tokens, ignore_eos=sampling.ignore_eos, stop=list(sampling.stop),
        stop_token_ids=list(sampling.stop_token_ids), include_stop_str_in_output=True,
        logit_bias=dict(sampling.logit_bias) or None, logprobs=sampling.logprobs, prompt_logprobs=None,
        detokenize=bool(sampling.stop), skip_special_tokens=False, spaces_between_special_tokens=False,
        output_kind=RequestOutputKind.CUMULATIVE, **_forced(request, arrival, work, able),
    )  # fmt: skip


def _forced(request: Request, arrival: Arrival, work: Work, able: Able) -> Mapping[str, object]:
    """The golden path as vLLM takes it. Raises Unsupported, EngineError."""
    if work.replay != "golden" or (arrival.companion and request.id not in work.golden):
        return {}
    if able.golden is not None:
        raise Unsupported(f"golden replay: {able.golden}")
    if request.id not in work.golden:
        raise EngineError(f"request {request.id!r}: golden replay was asked for, but no golden path was given")
    tokens = list(work.golden[request.id])
    if not able.trace:
        return {"extra_args": {GOLDEN: tokens}}
    if not picks_top(request):
        raise Unsupported(
            f"request {request.id!r}: vLLM's trace replay does not say what its sampler would have picked; "
            "it replays greedy requests with top candidates alone"
        )
    return {"trace_decode_token_ids": tokens}


def picks_top(request: Request) -> bool:
    """Whether the sampler's pick can be read off the reported candidates: it is the first of them."""
    sampling = request.sampling
    shaped = (sampling.repetition_penalty != 1.0 or sampling.frequency_penalty or sampling.presence_penalty
              or sampling.logit_bias or sampling.min_tokens)  # fmt: skip
    return sampling.temperature == 0 and sampling.logprobs > 0 and not shaped
