"""A started transformers model: one lifetime in this process, works one after another. It does not judge or store.

Rules: requested, resolved and observed are read from different places (settings, the loaded model's configuration,
torch and the batches that ran); after a failed step the engine is not used again.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch

from engines.arrivals import Arrivals, Standing
from engines.offline_checks import check_context, golden_paths, refuse_features
from engines.offline_traces import Answer, write_traces
from engines.transformers_continuous import ContinuousBatching, open_continuous
from engines.transformers_invariant import enable_operators, observe_operators
from engines.transformers_sampler import OFFERED, Sampler
from engines.transformers_static import StaticBatches
from harness.engine import Field, Progress, Scalar, Work
from harness.errors import EngineDied, EngineError
from harness.fingerprint.model_files import model_fields
from harness.fingerprint.software import package_fields
from harness.traces import Traces

PACKAGES = ("transformers", "triton", "kernels", "batch_invariant_ops")


@dataclass(slots=True, kw_only=True, eq=False)
class TransformersLifetime:
    """Implements `harness.engine.Engine`."""

    name: str
    folder: Path
    model: Any  # transformers.PreTrainedModel
    settings: Mapping[str, Scalar]
    continuous: ContinuousBatching | None
    eos_ids: tuple[int, ...]  # of the model's generation defaults
    padding: int = 0  # least padding of the newest work's rows
    dead: str = ""  # why it must not be used any more

    def resolved(self) -> Mapping[str, Scalar]:
        """The settings, with what the loaded model and torch made of them."""
        cache = self.continuous.processor.cache if self.continuous else None
        return {
            **self.settings,
            "attention_backend": str(self.model.config._attn_implementation),  # noqa: SLF001 - its only name
            "device": self.model.device.type,
            "dtype": str(self.model.dtype).removeprefix("torch."),
            "max_num_batched_tokens": cache.max_batch_tokens if cache else self.settings["max_num_batched_tokens"],
            "num_pages": int(cache.num_blocks) if cache else "not applicable",
            "page_size": self.settings["page_size"] if cache else "not applicable",
            "prefix_cache": bool(cache.use_prefix_sharing) if cache else False,
            "tf32": torch.backends.cuda.matmul.allow_tf32,
        }

    def observed(self) -> Mapping[str, Scalar]:
        """What torch and the newest work show."""
        return {
            "attention_backend": str(self.model.config._attn_implementation),  # noqa: SLF001 - its only name
            "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
            "dtype": str(next(self.model.parameters()).dtype).removeprefix("torch."),
            "padding": self.padding,
            "page_size": int(self.settings["page_size"]) if self.continuous else 0,
            "threads": torch.get_num_threads(),
            **observe_operators(),
        }

    def fingerprint(self) -> tuple[Field, ...]:
        """Model files, and the packages that compute."""
        return (
            Field(name="model.name", value=self.name, field_class="context", source="model"),
            *(entry for package in PACKAGES for entry in package_fields(package)),
            *model_fields(self.folder),
        )

    def generate(self, work: Work, progress: Progress) -> Traces:
        """Runs one work. Raises EngineError, EngineDied, Unsupported."""
        if self.dead:
            raise EngineDied(f"the engine failed before: {self.dead}")
        try:
            return self._generate(work, progress)
        except EngineDied as error:
            self.dead = str(error)
            raise

    def _generate(self, work: Work, progress: Progress) -> Traces:
        golden = golden_paths(work)
        for request in work.requests:
            refuse_features(request, "this adapter of transformers", offered=OFFERED)
            check_context(request, self.model.config.max_position_embeddings - cast("int", self.settings["padding"]))
        run = _Run(self, work, golden, progress)
        run.to_end()
        self.padding = run.padding
        return write_traces(list(run.answers.values()), run.ran)

    def stop(self) -> None:
        """Nothing outlives the process."""


class _Run:
    """One work on one lifetime."""

    def __init__(
        self, owner: TransformersLifetime, work: Work, golden: Mapping[str, tuple[int, ...]], progress: Progress
    ) -> None:
        self._requests = {request.id: request for request in work.requests}
        self._arrivals = Arrivals(work.schedule, self._requests)
        self._work, self._golden, self._progress = work, golden, progress
        self._begun = time.perf_counter()
        self._eos = owner.eos_ids
        self._waiting: list[Sampler] = []
        self._seats = cast("int", owner.settings["max_num_seqs"])
        self._static = StaticBatches(model=owner.model, settings=owner.settings, begun=self._begun)
        self._continuous = owner.continuous
        self._idled = 0
        self.samplers: dict[str, Sampler] = {}
        if self._continuous:
            self._continuous.begin(self._begun)

    @property
    def answers(self) -> dict[str, Answer]:
        """In the schedule's order once all have arrived."""
        return {one.request: self.samplers[one.request].answer for one in self._work.schedule.arrivals}

    @property
    def ran(self) -> list[Any]:
        return self._continuous.ran if self._continuous else self._static.ran

    @property
    def padding(self) -> int:
        return self._static.padding or 0

    def to_end(self) -> None:
        while self._arrivals.pending or self._busy():
            self._admit()
            if not self._busy():
                self._idled = max(self._idled, self._arrivals.next_step() - self._step())
                continue
            if self._continuous:
                self._continuous.advance()
                self._tell()
            else:
                batch, self._waiting = self._waiting[: self._seats], self._waiting[self._seats :]
                self._run_static(batch)

    def _run_static(self, batch: list[Sampler]) -> None:
        try:
            self._static.run(batch, self._tell)
        except EngineError:
            raise
        except Exception as error:
            raise EngineDied(f"transformers failed in a batch: {type(error).__name__}: {error}") from error

    def _admit(self) -> None:
        standings: dict[str, Standing] = {name: one.answer.standing for name, one in self.samplers.items()}
        for arrival in self._arrivals.take_due(self._step() + self._idled, standings):
            request = self._requests[arrival.request]
            answer = Answer(request=request, arrival=arrival, arrival_s=time.perf_counter() - self._begun)
            sampler = Sampler(answer, self._eos, self._golden.get(request.id), digests=self._work.logits_digests)
            self.samplers[request.id] = sampler
            if self._continuous:
                self._continuous.submit(sampler)
            else:
                self._waiting.append(sampler)

    def _busy(self) -> bool:
        return any(not one.answer.finish_reason for one in self.samplers.values())

    def _step(self) -> int:
        return self._continuous.step if self._continuous else self._static.step

    def _tell(self) -> None:
        answers = [one.answer for one in self.samplers.values()]
        done = sum(bool(answer.finish_reason) for answer in answers)
        self._progress(done, sum(len(answer.positions) for answer in answers))


def start_lifetime(name: str, folder: Path, settings: Mapping[str, Scalar]) -> TransformersLifetime:
    """Loads the model in this process. `settings` holds every setting. Raises EngineError, Unsupported."""
    torch.set_num_threads(cast("int", settings["threads"]))
    torch.use_deterministic_algorithms(cast("bool", settings["deterministic_algorithms"]))
    device = _device(str(settings["device"]))
    if settings["batch_invariant_ops"]:
        enable_operators(device)
    model = _load(folder, settings, device)
    eos_ids = _take_defaults(model)
    continuous = open_continuous(model, settings) if settings["batching"] == "continuous" else None
    return TransformersLifetime(
        name=name, folder=folder, model=model, settings=settings, continuous=continuous, eos_ids=eos_ids
    )


def _load(folder: Path, settings: Mapping[str, Scalar], device: str) -> Any:  # noqa: ANN401 - a model
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    backend = str(settings["attention_backend"])
    try:
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=getattr(torch, str(settings["dtype"])), attn_implementation=backend, local_files_only=True,
        )  # fmt: skip
    except (ImportError, OSError, ValueError) as error:
        raise EngineError(f"transformers did not load {folder.name} with {backend} attention: {error}") from error
    return model.to(device).eval()


def _device(wanted: str) -> str:
    here = torch.cuda.is_available()
    if wanted == "cuda" and not here:
        raise EngineError("device=cuda: torch sees no GPU here")
    return "cuda" if wanted != "cpu" and here else "cpu"


def _take_defaults(model: Any) -> tuple[int, ...]:  # noqa: ANN401 - a model
    """Leaves `generate` no defaults to fall back to, and returns the end-of-sequence ids that were among them."""
    from transformers import GenerationConfig

    found = model.generation_config.eos_token_id
    model.generation_config = GenerationConfig()
    return tuple(found) if isinstance(found, list) else () if found is None else (int(found),)
