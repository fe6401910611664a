"""A started DeepInfer: one lifetime in this process, works one after another. It does not judge or store.

Rules: what DeepInfer skips without a word is refused with the reason; its three conditions are read back from
DeepInfer's own configuration after it started, and from every sampling-parameter object before it is used; who ran
beside whom is read from the outputs of each step, which `LLM.generate` fetches through two methods that are watched.
"""

from __future__ import annotations

import importlib.util
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from engines.arrivals import Arrivals
from engines.deepinfer_local import VARIABLES
from engines.offline_checks import check_context, golden_paths, refuse_features
from engines.offline_traces import Answer, Position, Ran, write_traces
from harness.engine import Field, Progress, Scalar, Work
from harness.errors import EngineDied, EngineError, Unsupported
from harness.fingerprint.file_digests import FileDigests
from harness.fingerprint.model_files import model_fields
from harness.fingerprint.software import package_fields
from harness.packages import is_installed
from harness.request import Request
from harness.traces import NO_TOKEN, Traces

PYTHON = (3, 12)
SM = 10  # major compute capability of SM100
ALL_AT_ONCE = 1 << 62  # steps: an arrival that waits for nobody is due
MOST_SEED = (1 << 64) - 1
OFFERED = frozenset({"draws"})  # top-k and top-p come with it
REASONS = ("stop", "length")
NOT_INSTALLED = "DeepInfer is not installed here: its README says how to build 0.1.0 from source (Python 3.12, CUDA 13)"
PACKAGES = ("deepinfer", "deep_gemm", "deep_ep", "triton")


@dataclass(slots=True, kw_only=True, eq=False)
class Watch:
    """Which requests each step gave outputs for; `begin` forgets what was before."""

    engine: Any  # deepinfer.engine.llm_engine.LLMEngine
    request_of: Callable[[Any], str]  # DeepInfer's request id behind a raw output
    ahead: int = 0  # flushes that brought outputs: steps that had run ahead, since the start
    steps: list[list[str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Stands in for the two methods."""
        step, flush = self.engine.step, self.engine.flush_inflight_reqs
        self.engine.step = lambda: self._seen(step())
        self.engine.flush_inflight_reqs = lambda: self._flushed(flush())

    def begin(self) -> None:
        """Starts a new work."""
        self.steps = []

    def _seen(self, outputs: Any) -> Any:  # noqa: ANN401 - an array of pointers
        names = [self.request_of(output) for output in outputs]
        if names:
            self.steps.append(names)
        return outputs

    def _flushed(self, outputs: Any) -> Any:  # noqa: ANN401 - as above
        self.ahead += len(outputs) > 0
        return self._seen(outputs)


@dataclass(slots=True, kw_only=True, eq=False)
class DeepInferLifetime:
    """Implements `harness.engine.Engine`."""

    llm: Any  # deepinfer.entrypoints.llm.LLM
    folder: Path
    settings: Mapping[str, Scalar]
    conditions: Mapping[str, Scalar]  # what DeepInfer's own configuration says of its variables
    watch: Watch
    context: int
    handed: int = 0  # requests handed over so far; DeepInfer counts them from 0
    dead: str = ""

    def resolved(self) -> Mapping[str, Scalar]:
        """The settings, with what DeepInfer's configuration objects hold."""
        engine = self.llm.llm_engine
        return {
            **self.settings,
            **self.conditions,
            "chunked_prefill": bool(engine.scheduler_config.chunked_prefill),
            "expert_parallel_size": int(engine.parallel_config.expert_parallel_size),
            "max_num_seqs": int(engine.scheduler_config.max_num_seqs),
        }

    def observed(self) -> Mapping[str, Scalar]:
        """What the engine's objects and the steps so far show."""
        engine = self.llm.llm_engine
        return {
            **{f"condition.{name}": value for name, value in sorted(self.conditions.items())},
            "chunked_prefill": bool(engine.scheduler_config.chunked_prefill),
            "draft_length": self.conditions["draft_length"],
            "prefill_replay": str(engine.yoco_prefill_truncation_mode),
            "ranks": int(engine.parallel_config.expert_parallel_size),
            "steps_scheduled_ahead": self.watch.ahead,
        }

    def fingerprint(self) -> tuple[Field, ...]:
        """Model files, and the packages that compute."""
        fields = [entry for package in PACKAGES for entry in package_fields(package)]
        return (*fields, *model_fields(self.folder, FileDigests()))

    def generate(self, work: Work, progress: Progress) -> Traces:
        """Runs one work. Raises EngineError, EngineDied, Unsupported."""
        if self.dead:
            raise EngineDied(f"the engine failed before: {self.dead}")
        if work.logits_digests:
            raise Unsupported("rule `tensors`: DeepInfer reports no logits")
        golden = golden_paths(work)
        requests = {request.id: request for request in work.requests}
        for request in work.requests:
            refuse_features(request, "DeepInfer 0.1.0", offered=OFFERED)
            check_context(request, self.context)
        _refuse_hidden_picks(work, golden)
        leaving = [one.request for one in work.schedule.arrivals if one.cancel_after_tokens is not None]
        if leaving:
            raise Unsupported(f"request {leaving[0]!r} is to be cancelled; LLM.generate lets everything finish")
        self.watch.begin()
        answers: dict[str, Answer] = {}
        ran: list[Ran] = []
        arrivals, begun = Arrivals(work.schedule, requests), time.perf_counter()
        while arrivals.pending:
            due = arrivals.take_due(ALL_AT_ONCE, {name: one.standing for name, one in answers.items()})
            if not due:
                arrivals.next_step()  # says who waits for whom
            now = time.perf_counter() - begun
            batch = [Answer(request=requests[one.request], arrival=one, arrival_s=now) for one in due]
            self._call(batch, golden, begun, ran)
            answers |= {answer.request.id: answer for answer in batch}
            progress(len(answers), sum(len(answer.positions) for answer in answers.values()))
        return write_traces([answers[one.request] for one in work.schedule.arrivals], ran)

    def _call(
        self, batch: Sequence[Answer], golden: Mapping[str, tuple[int, ...]], begun: float, ran: list[Ran]
    ) -> None:
        """One `LLM.generate` with everything that is due."""
        parameters = [self._parameters(answer.request, golden.get(answer.request.id)) for answer in batch]
        known = {str(self.handed + index): answer for index, answer in enumerate(batch)}
        first = len(self.watch.steps)
        try:
            results = self.llm.generate(
                prompt_token_ids=[list(answer.request.prompt_token_ids) for answer in batch],
                sampling_params=parameters, use_tqdm=False,
            )  # fmt: skip
        except Exception as error:
            self.dead = f"{type(error).__name__}: {error}"
            raise EngineDied(f"DeepInfer failed: {self.dead}") from error
        self.handed += len(batch)
        if len(results) != len(batch):
            raise EngineError(f"DeepInfer answered {len(results)} of {len(batch)} requests")
        now = time.perf_counter() - begun
        for answer, outputs in zip(batch, results, strict=True):
            _take(answer, outputs, golden.get(answer.request.id), now)
        _note(self.watch.steps[first:], known, first, ran)

    def _parameters(self, request: Request, golden: tuple[int, ...] | None) -> Any:  # noqa: ANN401 - SamplingParams
        from deepinfer.sampling_params import SamplingParams

        sampling = request.sampling
        seed = (sampling.seed or 0) if self.settings["seeding"] == "request" else None
        made = SamplingParams(
            temperature=sampling.temperature, top_p=sampling.top_p, top_k=sampling.top_k or -1,
            ignore_eos=sampling.ignore_eos, max_tokens=sampling.max_tokens if golden is None else len(golden),
            top_logprobs=sampling.logprobs, so_args=None, golden_token_ids=None if golden is None else list(golden),
            seq_seed=seed,
        )  # fmt: skip
        if seed is not None and made.seq_seed != seed:
            raise EngineError(f"request {request.id!r}: seq_seed {seed} was given, DeepInfer holds {made.seq_seed}")
        return made

    def stop(self) -> None:
        """Ends DeepInfer's workers."""
        self.llm.close()


def _refuse_hidden_picks(work: Work, golden: Mapping[str, tuple[int, ...]]) -> None:
    """Raises Unsupported for a judged request whose sampler's own pick would not be known on a golden path."""
    companions = {arrival.request for arrival in work.schedule.arrivals if arrival.companion}
    for request in work.requests:
        shown = request.sampling.temperature == 0 and request.sampling.logprobs > 0
        if request.id in golden and request.id not in companions and not shown:
            raise Unsupported(
                f"request {request.id!r}: on a golden path DeepInfer does not say what its sampler would have taken; "
                "greedy requests with top candidates alone are replayed, others run with replay = natural"
            )


def _take(answer: Answer, outputs: Sequence[Any], golden: tuple[int, ...] | None, now: float) -> None:
    """One request's outputs as positions. Raises EngineError for an answer that is not whole."""
    name, sampling = answer.request.id, answer.request.sampling
    if not outputs or not outputs[-1].finished:
        raise EngineError(f"request {name!r}: DeepInfer never finished it")
    if str(outputs[-1].finish_reason) not in REASONS:
        raise EngineError(f"request {name!r}: DeepInfer ended it with {outputs[-1].finish_reason!r}")
    for index, output in enumerate(outputs):
        ids = list(output.top_token_ids)[: sampling.logprobs]
        values = list(output.top_logprobs)[: sampling.logprobs]
        if len(ids) != len(values):
            raise EngineError(f"request {name!r} position {index}: {len(ids)} top ids, {len(values)} top logprobs")
        token = int(output.token_id)
        if golden is not None and (index >= len(golden) or token != golden[index]):
            raise EngineError(f"request {name!r} position {index}: DeepInfer left the golden path with token {token}")
        ranked = sorted(zip(values, ids, strict=True), key=lambda one: (-one[0], one[1]))
        pick = token if golden is None else ranked[0][1] if ranked and sampling.temperature == 0 else NO_TOKEN
        answer.append(
            Position(token, pick, output.token_logprobs, [one for _, one in ranked], [one for one, _ in ranked]), now
        )
    answer.end(str(outputs[-1].finish_reason), now)


def _note(steps: Sequence[Sequence[str]], known: Mapping[str, Answer], first: int, ran: list[Ran]) -> None:
    """Rows of the step table from the requests each step gave outputs for; a first output carries the prompt."""
    given: dict[str, int] = {}
    for number, names in enumerate(steps, start=first):
        strange = sorted(set(names) - set(known))
        if strange:
            raise EngineError(f"DeepInfer's step gave an output of request {strange[0]!r}, which is not of this call")
        for name in dict.fromkeys(names):
            answer, count = known[name], names.count(name)
            prompt, before = len(answer.request.prompt_token_ids), given.get(name, 0)
            start = 0 if before == 0 else prompt + before - 1
            ran.append(Ran(number, answer.request.id, start, prompt + before + count - 1 - start))
            given[name] = before + count
            answer.drafted = (answer.drafted or 0) + count - 1


def start_lifetime(folder: Path, settings: Mapping[str, Scalar]) -> DeepInferLifetime:
    """Starts DeepInfer in this process. `settings` holds every setting. Raises EngineError, Unsupported."""
    refuse_platform(accelerator(), sys.version_info[:2], batch_invariant=settings["batch_invariant"] is True)
    if not is_installed("deepinfer"):
        raise Unsupported(NOT_INSTALLED)
    from deepinfer._C.engine import RequestOutput
    from deepinfer.entrypoints.llm import LLM
    from deepinfer.environ import envs

    most = cast("int", settings["max_num_batched_tokens"])
    try:
        llm = LLM(
            str(folder), expert_parallel_size=settings["expert_parallel_size"], decode_sequence=False,
            gpu_memory_utilization=settings["gpu_memory_utilization"], max_num_seqs=settings["max_num_seqs"],
            chunked_prefill=settings["chunked_prefill"], seed=0, **({"max_num_batched_tokens": most} if most else {}),
        )  # fmt: skip
    except Exception as error:
        raise EngineError(f"DeepInfer did not start: {type(error).__name__}: {error}") from error
    return DeepInferLifetime(
        llm=llm, folder=folder, settings=settings, conditions=read_conditions(envs, settings),
        watch=Watch(engine=llm.llm_engine, request_of=RequestOutput.get_request_id),
        context=int(llm.llm_engine.model_config.max_model_len),
    )  # fmt: skip


def read_conditions(envs: Any, settings: Mapping[str, Scalar]) -> dict[str, Scalar]:  # noqa: ANN401 - deepinfer's
    """What DeepInfer itself holds for each variable. Raises EngineError where it is not what was set."""
    found: dict[str, Scalar] = {}
    for setting, variable in VARIABLES.items():
        if setting == "keep_tokens" and settings["prefill_replay"] == "off":
            continue
        found[setting] = getattr(envs, variable)
        if found[setting] != settings[setting]:
            raise EngineError(f"{variable}: {settings[setting]!r} was set, DeepInfer holds {found[setting]!r}")
    return found


def accelerator() -> str:
    """What this machine computes with: "none", "ascend", or an NVIDIA GPU's "sm" and compute capability."""
    if importlib.util.find_spec("torch_npu") is not None:
        return "ascend"
    import torch

    if not torch.cuda.is_available():
        return "none"
    major, minor = torch.cuda.get_device_capability()
    return f"sm{major}{minor}"


def refuse_platform(found: str, python: tuple[int, ...], *, batch_invariant: bool) -> None:
    """Raises Unsupported, with the reason, where DeepInfer 0.1.0 cannot keep its contract or cannot run."""
    here = {"none": "there is no accelerator here"}.get(found, f"this machine has {found}")
    if found == "ascend":
        if batch_invariant:
            raise Unsupported(
                "DEEPINFER_BATCH_INVARIANT=1 is for NVIDIA alone: on Ascend DeepInfer asserts that it is off"
            )
    elif found[:-1] != f"sm{SM}":
        raise Unsupported(f"DeepInfer 0.1.0 runs on NVIDIA SM100 and Ascend 950; {here}")
    if python != PYTHON:
        raise Unsupported(f"DeepInfer 0.1.0 needs Python 3.12; this is {'.'.join(map(str, python))}")
