"""A started SGLang engine: one lifetime in this process, works one after another. It does not judge or store.

Rules: requested, resolved and observed are read from different places (settings, the finished server arguments, what
the scheduler says and a probe shows); an argument that this version does not know is an error that names it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from engines.http.answer import Offer
from engines.http.dialect import Prompt
from engines.http.dialects.prompt_logprobs import SglangScorer
from engines.http.dialects.sglang import Sglang
from engines.http.flavours import FLAVOURS
from engines.http.run import Route, run_paths, run_work
from engines.http.scoring import SAID
from engines.http.traces import write_traces
from engines.sglang_local import NO_GOLDEN
from engines.sglang_pipe import Pipe
from harness import limits
from harness.engine import Field, Progress, Scalar, Work
from harness.errors import EngineDied, EngineError, Unsupported
from harness.fingerprint.model_files import model_fields
from harness.fingerprint.software import package_fields
from harness.traces import Traces

if TYPE_CHECKING:
    from engines.http.client import Client

PACKAGES = ("sglang", "sgl_kernel", "flashinfer-python", "transformers", "triton")
DEFAULT_SEED = 42  # what SGLang's documentation says it draws with when none is sent
COMPANY = "who ran beside whom is read from interleaved streams, not from SGLang's own steps"
IGNORED = "seeds are ignored: two equal ones differ, or two different ones agree"
EVIDENCE = Offer(naming="ids", logprobs=True, topk=False)  # candidates come where a request asks for them
READ = {  # setting or observed name to the server argument that holds it
    "attention_backend": "attention_backend",
    "deterministic": "enable_deterministic_inference",
    "dtype": "dtype",
    "max_num_batched_tokens": "chunked_prefill_size",
    "max_num_seqs": "max_running_requests",
    "page_size": "page_size",
    "sampling_backend": "sampling_backend",
    "tensor_parallel_size": "tp_size",
}


@dataclass(slots=True, kw_only=True, eq=False)
class SglangLifetime:
    """Implements `harness.engine.Engine` and `ResetsCache`."""

    engine: Any  # sglang.Engine
    folder: Path
    settings: Mapping[str, Scalar]
    default_seed: str
    inexact: int = 0

    def resolved(self) -> Mapping[str, Scalar]:
        """The settings, with what SGLang's finished arguments hold in their place."""
        finished = _finished(self.engine.server_args)
        return {
            **self.settings,
            **{name: _scalar(finished.get(source)) for name, source in READ.items()},
            "enforce_eager": _scalar(finished.get("disable_cuda_graph")),
            "prefix_cache": not finished.get("disable_radix_cache", False),
        }

    def observed(self) -> Mapping[str, Scalar]:
        """What the scheduler says of itself, and what the probe of the seed showed."""
        told = self.engine.get_server_info()
        notes: dict[str, Scalar] = {limits.COMPANY: COMPANY}
        if self.default_seed == IGNORED:
            notes[limits.SAMPLING] = IGNORED
        if self.settings["scoring"] == "prefill":
            notes[limits.PICKS] = SAID
        if self.inexact:
            notes[limits.ROUNDED] = f"{self.inexact} logprobs hold fewer digits than a float32 has"
        return {
            **{name: _scalar(told.get(source)) for name, source in READ.items()},
            "default_seed": self.default_seed,
            "execution": "eager" if told.get("disable_cuda_graph") else "CUDA graphs",
            "radix_cache": "off" if told.get("disable_radix_cache") else "on",
            "ranks": _scalar(told.get("tp_size")),
            "version": _scalar(told.get("version")),
            **notes,
        }

    def fingerprint(self) -> tuple[Field, ...]:
        """Model files, and the packages that compute."""
        return (*(entry for package in PACKAGES for entry in package_fields(package)), *model_fields(self.folder))

    def generate(self, work: Work, progress: Progress) -> Traces:
        """Runs one work. Raises EngineError, EngineDied, Unsupported."""
        if work.logits_digests:
            raise Unsupported("rule `tensors`: SGLang reports no logits")
        scored = self.settings["scoring"] == "prefill"
        if work.replay == "golden" and not scored:
            raise Unsupported(NO_GOLDEN)
        prompts = {request.id: Prompt(ids=request.prompt_token_ids) for request in work.requests}
        route = Route(flavour=replace(FLAVOURS["sglang"], metrics=""), dialect=Sglang(), model="", offer=EVIDENCE)
        pipe = cast("Client", Pipe(self.engine, seeded=self.settings["seeding"] == "request"))
        running = (
            run_paths(pipe, route, work, prompts, progress, SglangScorer(), str(self.settings["scored_prompt"]))
            if scored
            else run_work(pipe, route, work, prompts, progress)
        )
        ran = self.engine.loop.run_until_complete(running)
        if not ran.exchanges:
            raise EngineDied("SGLang ended the work without an answer")
        topk = all(answer.offer.topk for one in ran.exchanges for answer in one.answers if not one.left)
        traces = write_traces(ran, EVIDENCE._replace(topk=topk))
        self.inexact += dict(traces.counters)["inexact_numbers"]
        return traces

    def reset_cache(self) -> None:
        """Empties the radix cache. Raises EngineError if SGLang does not say that it did."""
        answer = self.engine.flush_cache()
        if getattr(answer, "success", answer) is not True:
            raise EngineError(f"SGLang did not empty its radix cache: {answer!r}")

    def stop(self) -> None:
        """Ends its processes."""
        self.engine.shutdown()


def start_lifetime(folder: Path, settings: Mapping[str, Scalar]) -> SglangLifetime:
    """Starts SGLang in this process. `settings` holds every setting. Raises EngineError, Unsupported."""
    import sglang

    try:
        engine = sglang.Engine(**arguments(folder, settings))
    except Exception as error:
        raise EngineError(f"SGLang did not start: {type(error).__name__}: {error}") from error
    found = SglangLifetime(engine=engine, folder=folder, settings=settings, default_seed=probe_seed(engine))
    found.reset_cache()
    return found


def arguments(folder: Path, settings: Mapping[str, Scalar]) -> dict[str, object]:
    """Keyword arguments of `sglang.Engine`, which are those of its ServerArgs."""
    optional = {"max_model_len": "context_length", "max_num_batched_tokens": "chunked_prefill_size",
                "page_size": "page_size"}  # fmt: skip
    backend = settings["attention_backend"]
    return {
        "model_path": str(folder),
        "skip_tokenizer_init": False,
        "enable_deterministic_inference": settings["deterministic"],
        "dtype": settings["dtype"],
        "disable_cuda_graph": settings["enforce_eager"],
        "disable_radix_cache": not settings["prefix_cache"],
        "max_running_requests": settings["max_num_seqs"],
        "mem_fraction_static": settings["mem_fraction"],
        "tp_size": settings["tensor_parallel_size"],
        "random_seed": 0,
        "log_level": "error",
        **({"attention_backend": backend} if backend != "auto" else {}),
        **{argument: settings[name] for name, argument in optional.items() if settings[name]},
    }


def probe_seed(engine: Any) -> str:  # noqa: ANN401 - sglang.Engine
    """With which seed SGLang draws when none is sent, as far as draws show: "42", "not 42", or IGNORED."""
    none, one, again, other = (_drawn(engine, seed) for seed in (None, DEFAULT_SEED, DEFAULT_SEED, DEFAULT_SEED + 1))
    if one != again or one == other:
        return IGNORED
    return str(DEFAULT_SEED) if none == one else f"not {DEFAULT_SEED}"


def _drawn(engine: Any, seed: int | None) -> list[int]:  # noqa: ANN401 - as above
    sampling = {"temperature": 2.0, "max_new_tokens": 16, "ignore_eos": True}
    chosen = {} if seed is None else {"sampling_seed": seed}
    answer = engine.generate(input_ids=list(range(5, 25)), sampling_params={**sampling, **chosen}, return_logprob=True)
    return [int(entry[1]) for entry in answer["meta_info"]["output_token_logprobs"]]


def _finished(server_args: Any) -> Mapping[str, object]:  # noqa: ANN401 - sglang's ServerArgs
    """The arguments after SGLang's own decisions: newer versions keep those apart from what was asked for."""
    resolve = getattr(server_args, "resolved_dict", None)
    found: Mapping[str, object] = resolve() if resolve is not None else vars(server_args)
    return found


def _scalar(value: object) -> Scalar:
    return value if isinstance(value, str | int | float | bool) else "not told" if value is None else str(value)
