"""Static batches: `generate` on rows padded to the left, one batch after another. It does not know the harness's works.

Rules: whatever has arrived when a batch ends forms the next one, up to the seats, in the order of arrival; nobody joins
a batch that runs; every token is taken by the request's own sampler, which `generate` calls as a logits processor and
whose choice it then has to take; a row that ended is computed on until the longest one ends, as `generate` does.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from engines.offline_traces import Ran
from engines.transformers_sampler import Sampler

Told = Callable[[], None]  # called after every step


@dataclass(slots=True, kw_only=True)
class StaticBatches:
    """Runs batches on one model; `ran` and `step` grow over the batches of a work."""

    model: Any  # a transformers model with `generate`
    settings: Mapping[str, Any]
    begun: float
    ran: list[Ran] = field(default_factory=list)
    step: int = 0
    padding: int | None = None  # least masked tokens at a row's left, over the rows of the work

    def run(self, samplers: Sequence[Sampler], told: Told) -> None:
        """One batch to its end."""
        ids, mask = self._rows([list(one.answer.request.prompt_token_ids) for one in samplers])
        if self.settings["scoring"] == "prefill" and all(one.golden is not None for one in samplers):
            self._score(samplers)
            told()
            return
        self._generate(samplers, ids, mask, told)

    def _generate(self, samplers: Sequence[Sampler], ids: torch.Tensor, mask: torch.Tensor, told: Told) -> None:
        from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList

        columns = ids.shape[1]
        chunk = self._chunk(len(samplers), columns)

        def take(_ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
            self._note(samplers, columns, chunk)
            chosen = torch.full_like(logits, -torch.inf)
            for row, sampler in enumerate(samplers):
                going = not sampler.answer.finish_reason
                token = sampler.take(logits[row], time.perf_counter() - self.begun) if going else 0
                self._cancel(sampler)
                chosen[row, token] = 0.0
            told()
            return chosen

        def ended(ids: torch.Tensor, _scores: Any, **_options: Any) -> torch.Tensor:  # noqa: ANN401 - generate's
            done = [bool(sampler.answer.finish_reason) for sampler in samplers]
            return torch.tensor(done, device=ids.device)

        config = GenerationConfig(
            do_sample=False, num_beams=1, use_cache=True, eos_token_id=None, pad_token_id=0,
            max_new_tokens=max(sampler.most for sampler in samplers),
            **({"prefill_chunk_size": chunk} if chunk < columns else {}),
        )  # fmt: skip
        self.model.generate(
            input_ids=ids, attention_mask=mask, generation_config=config,
            logits_processor=LogitsProcessorList([take]), stopping_criteria=StoppingCriteriaList([ended]),
        )  # fmt: skip

    def _score(self, samplers: Sequence[Sampler]) -> None:
        """Reads prompts and golden paths in one forward pass, and takes all positions from it."""
        rows = [[*one.answer.request.prompt_token_ids, *(one.golden or ())[:-1]] for one in samplers]
        ids, mask = self._rows(rows)
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        with torch.no_grad():
            logits = self.model(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False).logits
        for row, sampler in enumerate(samplers):
            self.ran.append(Ran(self.step, sampler.answer.request.id, 0, len(rows[row])))
            sampler.answer.drafted = sampler.most - 1
            for index in range(sampler.most):
                sampler.take(logits[row, index - sampler.most], time.perf_counter() - self.begun)
        self.step += 1

    def _rows(self, rows: Sequence[Sequence[int]]) -> tuple[torch.Tensor, torch.Tensor]:
        """(B, columns) ids and mask, rows padded to the left; what is least padded is kept as an observation."""
        columns = max(map(len, rows)) + self.settings["padding"]
        ids = torch.zeros((len(rows), columns), dtype=torch.long)
        mask = torch.zeros((len(rows), columns), dtype=torch.long)
        for row, tokens in enumerate(rows):
            ids[row, columns - len(tokens) :] = torch.tensor(tokens)
            mask[row, columns - len(tokens) :] = 1
        least = int((mask == 0).sum(-1).min())
        self.padding = least if self.padding is None else min(self.padding, least)
        return ids.to(self.model.device), mask.to(self.model.device)

    def _chunk(self, rows: int, columns: int) -> int:
        """Columns of one prefill step."""
        most: int = self.settings["max_num_batched_tokens"]
        return columns if not most else min(columns, max(1, most // rows))

    def _note(self, samplers: Sequence[Sampler], columns: int, chunk: int) -> None:
        """Writes down the steps whose last one gave the logits at hand: prefill in chunks, or one token per row."""
        first = not any(sampler.answer.positions for sampler in samplers)
        for begin in range(0, columns, chunk) if first else (None,):
            rows = 0
            for sampler in samplers:
                if begin is None:
                    generated = len(sampler.answer.positions)
                    start, count = len(sampler.answer.request.prompt_token_ids) + generated - 1, 1
                    count = 0 if sampler.answer.finish_reason else count
                else:
                    start, count = _part(columns - len(sampler.answer.request.prompt_token_ids), begin, chunk, columns)
                if count:
                    self.ran.append(Ran(self.step, sampler.answer.request.id, start, count))
                    rows += 1
            self.step += rows > 0

    def _cancel(self, sampler: Sampler) -> None:
        """A companion that was to leave stops being written down; its row is computed on."""
        answer = sampler.answer
        due = answer.arrival.cancel_after_tokens
        if due is not None and not answer.finish_reason and len(answer.positions) >= due:
            answer.end("abort", time.perf_counter() - self.begun)


def _part(padding: int, begin: int, chunk: int, columns: int) -> tuple[int, int]:
    """(start, count) of a row's own tokens in columns [begin, begin + chunk)."""
    start, end = max(begin, padding), min(begin + chunk, columns)
    return start - padding, max(0, end - start)
