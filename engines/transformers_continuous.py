"""transformers' continuous batching, stepped by us: its scheduler, its paged cache, its forward; our sampler.

It does not know the harness's works. Rules: no background thread, so that arrivals follow steps; rows are read from
the batch that the scheduler prepared; the one method that samples is replaced, and gets the raw logits of each row;
a version whose parts are not where they are expected is refused with what is missing.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from engines.offline_traces import Ran
from engines.transformers_sampler import Sampler
from harness.errors import EngineDied, Unsupported

if TYPE_CHECKING:
    import torch

WHOLE_PROMPTS = 8192  # tokens in one step where none is set
_PROCESSOR_PARTS = ("prepare_next_batch", "update_batch", "_generation_step", "inputs_and_outputs", "model_runner",
                    "scheduler", "offloading_manager")  # fmt: skip


@dataclass(slots=True, kw_only=True)
class ContinuousBatching:
    """One manager and processor for a lifetime; `begin` starts a work."""

    manager: Any
    processor: Any
    model: Any
    samplers: dict[str, Sampler] = field(default_factory=dict)
    ran: list[Ran] = field(default_factory=list)
    ends: dict[str, int] = field(default_factory=dict)  # request to the end of its newest row
    step: int = 0
    begun: float = 0.0

    def begin(self, begun: float) -> None:
        """Forgets the work before; its requests are gone. `begun` is `time.perf_counter` at the work's start."""
        self.samplers, self.ran, self.ends, self.step, self.begun = {}, [], {}, 0, begun

    def submit(self, sampler: Sampler) -> None:
        """Hands a request to transformers, which ends it where the sampler does."""
        request = sampler.answer.request
        self.samplers[request.id] = sampler
        stop_ids = sorted(sampler.stop_ids) if sampler.golden is None else []
        self.manager.add_request(
            list(request.prompt_token_ids), request_id=request.id, max_new_tokens=sampler.most,
            eos_token_id=stop_ids or -1,
        )  # fmt: skip

    def advance(self) -> None:
        """One step. Raises EngineDied if transformers fails in it."""
        try:
            ready = self.processor.prepare_next_batch()
            if ready:
                self._note(self.processor.inputs_and_outputs.requests_in_batch)
                self.processor._generation_step(self.model)  # noqa: SLF001 - no public name does one step alone
                self.processor.update_batch()
        except EngineDied:
            raise
        except Exception as error:  # the sampler's too: what else was in the batch cannot be taken back
            raise EngineDied(f"transformers failed in a step: {type(error).__name__}: {error}") from error
        if not ready:
            raise EngineDied("requests wait, and transformers' scheduler prepares no batch")
        self._cancel()

    def sample(self, scores: torch.Tensor, output_ids: torch.Tensor) -> None:
        """Stands in for ModelRunner._sample: scores (1, rows, vocab) float32, output_ids (1 or 2, slots) int32."""
        rows = [state for state in self.processor.inputs_and_outputs.requests_in_batch if state.has_new_token]
        now = time.perf_counter() - self.begun
        for row, state in enumerate(rows):
            output_ids[0, row] = self.samplers[state.state.request_id].take(scores[0, row], now)

    def _note(self, batch: list[Any]) -> None:
        for future in batch:
            name, count = future.state.request_id, future.query_length
            start = future.state.position_offset - count  # the offset already counts this step
            answer = self.samplers[name].answer
            if name not in self.ends:
                answer.cached_tokens = start
            elif start < self.ends[name]:
                raise EngineDied(f"request {name!r} was started over: the KV pages ran out; raise num_pages")
            self.ends[name] = start + count
            self.ran.append(Ran(self.step, name, start, count))
        self.step += 1

    def _cancel(self) -> None:
        for name, sampler in self.samplers.items():
            answer = sampler.answer
            due = answer.arrival.cancel_after_tokens
            if due is not None and not answer.finish_reason and len(answer.positions) >= due:
                self.processor.scheduler.set_request_cancellation(name)
                self.processor.scheduler.clear_cancelled_requests()
                answer.end("abort", time.perf_counter() - self.begun)


def open_continuous(model: Any, settings: Mapping[str, Any]) -> ContinuousBatching:  # noqa: ANN401 - a model
    """Sets continuous batching up on a loaded model. Raises Unsupported for a version that has it not, or otherwise."""
    try:
        from transformers import ContinuousBatchingConfig, GenerationConfig

        manager = model.init_continuous_batching(
            generation_config=GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0, max_new_tokens=1),
            continuous_batching_config=ContinuousBatchingConfig(
                page_size=settings["page_size"], num_blocks=settings["num_pages"],
                max_batch_tokens=settings["max_num_batched_tokens"] or WHOLE_PROMPTS,
                max_requests_per_batch=settings["max_num_seqs"], allow_block_sharing=settings["prefix_cache"],
                use_async_batching=False, use_cuda_graph=False, return_logprobs=False, auto_switch_to_flash=False,
                seed=0,
            ),
        )  # fmt: skip
    except (AttributeError, ImportError, TypeError, ValueError) as error:
        raise Unsupported(f"batching=continuous: transformers {_version()} offers it not in this form: {error}") from (
            error
        )
    make = getattr(manager, "_create_batch_processor", None)
    processor = make() if make is not None else None
    missing = [part for part in _PROCESSOR_PARTS if not hasattr(processor, part)]
    if processor is None or missing or not hasattr(getattr(processor, "model_runner", None), "_sample"):
        part = ", ".join(missing) or "ModelRunner._sample"
        raise Unsupported(f"batching=continuous: transformers {_version()} has no {part} where it was expected")
    manager.batch_processor = processor
    found = ContinuousBatching(manager=manager, processor=processor, model=model)
    processor.model_runner._sample = found.sample  # noqa: SLF001 - the one place where logits can be seen
    return found


def _version() -> str:
    return version("transformers")
