"""The bundled engine as the harness runs it: one lifetime, works one after another.

It does not judge or store. Rules: requested, resolved and observed are read from different places; a work
leaves nothing behind for the next; what the engine cannot do is refused before anything runs.
"""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

from engines.bundled.arithmetic import open_arithmetic
from engines.bundled.batch import Arithmetic, Closes, Ranked
from engines.bundled.cache_store import restore_cache, save_cache
from engines.bundled.config import EngineConfig, Model, ModelConfig
from engines.bundled.draft import open_drafter
from engines.bundled.engine import Engine
from engines.bundled.errors import NotSupported
from engines.bundled.fast import open_fast_path
from engines.bundled.faults import HOST_FORWARD
from engines.bundled.gpu import check_dtype, fit_pages, open_gpu_arithmetic
from engines.bundled.gpu.ledger import kernels_launched
from engines.bundled.grammar import Grammars
from engines.bundled.kernels import library
from engines.bundled.kernels.interface import KernelError, Kernels
from engines.bundled.models.catalogue import open_source
from engines.bundled.models.finite import check_weights
from engines.bundled.models.source import Origin
from engines.bundled.tokenizer import Tokenizer
from engines.bundled_adapter import harness_errors
from engines.bundled_caches import Caches, TunesNothing, open_caches
from engines.bundled_timed import BundledSession
from engines.bundled_work import run_work
from harness.engine import Field, FieldClass, Footprint, Progress, Scalar, TimedSession, Work
from harness.errors import EngineError
from harness.request import Request
from harness.traces import Traces

POOL_BYTES = 3 << 29  # 1.5 GiB of keys and values unless num_pages says otherwise
NOT_APPLICABLE = "not applicable"
_FLOAT_BYTES = 4
_THREADS_SEEN, _EXECUTION, _LOGITS_DEVICE = "threads_seen", "execution", "logits_device"
_SEEN = (_THREADS_SEEN, _EXECUTION, _LOGITS_DEVICE)  # what an arithmetic saw at work: observed, not resolved


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BundledLifetime(TunesNothing):
    """A started engine; implements `harness.engine.Engine`."""

    engine: Engine
    model_name: str
    model_digest: str
    origin: Origin
    tokenizer: Tokenizer
    arithmetic: Arithmetic
    kernels: Kernels
    samples: str  # "together" | "separate"
    caches: Caches
    kernels_before: int = field(default_factory=kernels_launched)  # run on a device before anything was served

    def resolved(self) -> Mapping[str, Scalar]:
        """The engine's options as they were settled, and what the arithmetic says of itself."""
        config = self.engine.config
        return {
            "collectives": NOT_APPLICABLE,
            "rank_cores": NOT_APPLICABLE,
            **{name: value for name, value in self.arithmetic.describe().items() if name not in _SEEN},
            "arithmetic": self.arithmetic.name,
            "max_num_seqs": config.max_num_seqs,
            "max_num_batched_tokens": config.max_num_batched_tokens,
            "page_size": config.page_size,
            "num_pages": config.num_pages,
            "threads": config.threads,
            "tuning": config.tuning,
            "prefix_cache": self.engine.cache is not None,
            "policy": config.policy,
            "priority_preempts": config.priority_preempts,
            "disaggregated": config.disaggregated,
            "replica": NOT_APPLICABLE,
            "tensor_parallel_size": config.tensor_parallel_size,
            "expert_parallel_size": config.expert_parallel_size,
            "ranks": max(config.tensor_parallel_size, config.expert_parallel_size),
            "async_scheduling": self.engine.ahead is not None,
            "fault": config.fault,
            "draft": config.draft,
            "draft_length": config.draft_length,
            "draft_policy": config.draft_policy,
            "rollback": config.rollback,
            "scoring": config.scoring,
            "observer": config.observer,
            "samples": self.samples,
            "trainer": "off",
            "seeding": config.seeding,
            "enforce_eager": config.enforce_eager,
            "k_order": config.k_order,
            "kernel_caches": self.caches.kind,
        }

    def observed(self) -> Mapping[str, Scalar]:
        """What is so inside the process now; threads are the most that worked on one call so far."""
        said = self.arithmetic.describe()
        return {
            "threads": said.get(_THREADS_SEEN, self.kernels.threads_seen()),
            "execution": said.get(_EXECUTION, NOT_APPLICABLE),
            "caches_at_start": self.caches.digest,
            "isa": self.kernels.isa,
            "compiler": self.kernels.compiler,
            "backend": self.kernels.backend,
            "page_size": self.engine.scheduler.pages.size,
            "num_pages": self.engine.scheduler.pages.count,
            "steps_scheduled_ahead": self.engine.ahead.served_steps if self.engine.ahead else 0,
            "cached_pages": len(self.engine.cache) if self.engine.cache else 0,
            "logprobs_computed": self.engine.observed_rows > 0,
            "torch_imported": "torch" in sys.modules,
            "trainer": "off",
            **self._observed_device(said),
            **self._observed_ranks(),
        }

    def _observed_device(self, said: Mapping[str, Scalar]) -> Mapping[str, Scalar]:
        """Where the newest logits lay, and how many kernels this process ran on a device since it began to serve.

        Triton's and torch's kernels are not counted, so nothing is said where they compute.
        """
        where = {_LOGITS_DEVICE: said[_LOGITS_DEVICE]} if _LOGITS_DEVICE in said else {}
        if self.arithmetic.name not in ("portable", "free") or self.engine.config.dtype != "float32":
            return where
        return {**where, "gpu_kernels": kernels_launched() - self.kernels_before}

    def _observed_ranks(self) -> Mapping[str, Scalar]:
        """How many processes answer, all having run the same steps, and the most threads each was seen to use."""
        if not isinstance(self.arithmetic, Ranked):
            return {"ranks": 1}
        with harness_errors():
            counts = self.arithmetic.counts()
        steps = {count["steps"] for count in counts}
        if len(steps) > 1:
            raise EngineError(f"ranks have run different numbers of steps: {sorted(steps)}")
        threads = " ".join(str(count["threads_seen"]) for count in counts)
        cores = " ".join(str(count["cores"]) for count in counts)
        return {"ranks": len({count["pid"] for count in counts}), "threads_by_rank": threads, "cores_by_rank": cores}

    def fingerprint(self) -> tuple[Field, ...]:
        """Model, tokenizer, arithmetic and kernels: what only this engine knows."""
        torch = sys.modules.get("torch")
        return (
            _field("model.name", self.model_name, "model source", "context"),
            _field("model.digest", self.model_digest, "float32 weights and shape"),
            _field("model.source", self.origin.kind, "model source"),
            _field("model.quantisation", self.origin.quantisation, "tensor types of the model's file"),
            _field("model.dtype", self.engine.config.dtype, "weights as computed with"),
            _field("tokenizer.digest", self.tokenizer.digest, "tokenizer and chat template"),
            _field("chat_template.digest", self.tokenizer.template_digest, "chat template"),
            _field("arithmetic.name", self.arithmetic.name, "arithmetic"),
            _field("arithmetic.definition", self.arithmetic.definition, "docs/numerics.md"),
            _field("arithmetic.torch", str(torch.__version__) if torch else NOT_APPLICABLE, "torch, if imported"),
            _field("kernels.digest", self.kernels.digest, "source, compiler, flags and instruction set"),
            _field("kernels.backend", self.kernels.backend, "kernels or fallback"),
            _field("process.peak_memory_kib", _peak_memory_kib(), "getrusage", "context"),
        )

    def generate(self, work: Work, progress: Progress) -> Traces:
        """Runs one work. Raises EngineError, Unsupported."""
        with harness_errors():
            return run_work(self.engine, work, progress, samples=self.samples)

    def open_timed(self, requests: Sequence[Request]) -> TimedSession:
        """Serves by the clock. Raises EngineError, Unsupported."""
        with harness_errors():
            return BundledSession(self.engine, requests, one_by_one=self.samples == "separate")

    def footprint(self) -> Footprint:
        """Memory of this process and the other ranks, and the pages; what lies on a card is not counted."""
        pages = self.engine.scheduler.pages
        others = self.arithmetic.counts()[1:] if isinstance(self.arithmetic, Ranked) else ()
        return Footprint(
            peak_memory_bytes=1024 * (_peak_memory_kib() + sum(count["peak_memory_kib"] for count in others)),
            peak_device_bytes=None,
            kv_capacity_tokens=pages.size * pages.count,
        )

    def save_cache(self, folder: Path) -> None:
        """Writes the prefix cache, or what is to be handed over. Raises EngineError, Unsupported."""
        with harness_errors():
            if self.engine.outbox is not None:
                self.engine.outbox.save(folder)
            else:
                save_cache(self.engine, folder)

    def restore_cache(self, folder: Path) -> None:
        """Fills the empty prefix cache. Raises EngineError, naming what differs, and Unsupported."""
        with harness_errors():
            restore_cache(self.engine, folder)

    def stop(self) -> None:
        """Ends the other ranks, if there are any."""
        if isinstance(self.arithmetic, Closes):
            self.arithmetic.close()
        self.caches.discard()


def start_lifetime(model_name: str, settings: Mapping[str, Scalar]) -> BundledLifetime:
    """Opens the model, packs its weights and takes its pages. `settings` holds every setting."""
    source = open_source(model_name)
    model, tokenizer = source.model(), source.tokenizer()
    check_weights(model)
    config = resolve_config(model.config, settings)
    caches = open_caches(cast("str", settings["kernel_caches"]))
    kernels = load_kernels(config)
    device = cast("str", settings["device"])
    check_dtype(config, device)
    if device != "cpu" and not settings["num_pages"]:
        config = fit_pages(model.config, config, device)
    if device == "cpu":
        check_pool(model.config, config, _physical_bytes())
    arithmetic = open_forward(model_name, model, config, "cpu" if config.fault == HOST_FORWARD else device)
    return BundledLifetime(
        engine=Engine(
            model.config,
            config,
            arithmetic,
            kernels,
            tokenizer.decode,
            model_digest=model.digest,
            drafter=open_drafter(model, config, kernels),
            fast=open_fast_path(model, config, kernels, arithmetic),
            grammars=Grammars(tokenizer, model.config.vocab_size, model.config.eos_token_ids),
        ),
        model_name=model.name,
        model_digest=model.digest,
        origin=source.origin(),
        tokenizer=tokenizer,
        arithmetic=arithmetic,
        kernels=kernels,
        samples=cast("str", settings["samples"]),
        caches=caches,
    )


def open_forward(model_name: str, model: Model, config: EngineConfig, device: str) -> Arithmetic:
    """The forward pass: here, on a device, or over several processes. Raises NotSupported, RankError."""
    if max(config.tensor_parallel_size, config.expert_parallel_size) > 1:
        from engines.bundled.parallel.ranks import open_parallel  # it imports torch

        return open_parallel(model_name, model, config, device=device)
    return open_arithmetic(model, config) if device == "cpu" else open_gpu_arithmetic(model, config, device)


def load_kernels(config: EngineConfig) -> Kernels:
    """The kernels of a configuration.

    Raises:
        NotSupported: an instruction set or a compiler was asked for by name and cannot be had here.
        KernelError: this machine's own choice cannot be built or trusted.
    """
    try:
        return library.load(config.isa, config.compiler)
    except KernelError as error:
        if config.isa == "auto" and config.compiler == "auto":
            raise
        raise NotSupported(str(error)) from error


def resolve_config(model: ModelConfig, settings: Mapping[str, Scalar]) -> EngineConfig:
    """The engine's options, with num_pages 0 settled for this model."""
    page_size, seats = cast("int", settings["page_size"]), cast("int", settings["max_num_seqs"])
    return EngineConfig(
        arithmetic=cast("str", settings["arithmetic"]),
        dtype=cast("str", settings["dtype"]),
        max_num_seqs=seats,
        max_num_batched_tokens=cast("int", settings["max_num_batched_tokens"]),
        page_size=page_size,
        num_pages=cast("int", settings["num_pages"]) or default_pages(model, seats, page_size),
        threads=cast("int", settings["threads"]),
        isa=cast("str", settings["isa"]),
        compiler=cast("str", settings["compiler"]),
        tuning=cast("int", settings["tuning"]),
        prefix_cache=cast("bool", settings["prefix_cache"]),
        policy=cast("str", settings["policy"]),
        priority_preempts=cast("bool", settings["priority_preempts"]),
        async_scheduling=cast("bool", settings["async_scheduling"]),
        fault=cast("str", settings["fault"]),
        draft=cast("str", settings["draft"]),
        draft_length=cast("int", settings["draft_length"]),
        draft_policy=cast("str", settings["draft_policy"]),
        rollback=cast("str", settings["rollback"]),
        scoring=cast("str", settings["scoring"]),
        observer=cast("str", settings["observer"]),
        tensor_parallel_size=cast("int", settings["tensor_parallel_size"]),
        expert_parallel_size=cast("int", settings["expert_parallel_size"]),
        collectives=cast("str", settings["collectives"]),
        disaggregated=cast("str", settings["disaggregated"]),
        rendezvous_port=cast("int", settings["rendezvous_port"]),
        seeding=cast("str", settings["seeding"]),
        enforce_eager=cast("bool", settings["enforce_eager"]),
        kv_fraction=cast("float", settings["kv_fraction"]),
        k_order=cast("str", settings["k_order"]),
    )


def default_pages(model: ModelConfig, seats: int, page_size: int) -> int:
    """Pages for `seats` full contexts, within POOL_BYTES, and never fewer than one full context needs."""
    context = -(-model.max_position_embeddings // page_size)
    return max(context, min(seats * context, POOL_BYTES // (token_bytes(model) * page_size)))


def check_pool(model: ModelConfig, config: EngineConfig, memory: int) -> None:
    """Raises NotSupported for a pool that cannot fit in `memory` bytes; taking it anyway ends the process later."""
    copies = max(1, config.expert_parallel_size // config.tensor_parallel_size)  # ranks that split experts alone
    needed = token_bytes(model) * config.page_size * config.num_pages * copies
    if needed > memory:
        pool = f"num_pages={config.num_pages} of {config.page_size} tokens"
        msg = (
            f"{pool}: needs {needed / 2**30:.1f} GiB for keys and values, this machine has {memory / 2**30:.1f} GiB; "
            "lower num_pages"
        )
        raise NotSupported(msg)


def token_bytes(model: ModelConfig) -> int:
    """Bytes of keys and values of one token, all layers."""
    return 2 * model.num_hidden_layers * model.num_key_value_heads * model.head_dim * _FLOAT_BYTES


def _physical_bytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _field(name: str, value: Scalar, source: str, field_class: FieldClass = "identity") -> Field:
    return Field(name=name, value=value, field_class=field_class, source=source)


def _peak_memory_kib() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
