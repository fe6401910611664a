"""Greedy generation that keeps the device busy: tokens go from step to step on the device, the host follows behind.

It knows prompts and lengths, no sampling parameters. Rules: a sequence keeps its seat and its pages from admission to
its end; waiting prompts are prefilled before anybody decodes on; what a step picked is read one step later, so the host
never waits for the newest token; a logit that is no finite number is an error that names the request.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from engines.bundled.batch import StepBatch
from engines.bundled.errors import ComputeError
from engines.bundled.gpu.tensorcore.forward import TensorCoreArithmetic
from engines.bundled.gpu.tensorcore.layout import host, to_device
from engines.bundled.gpu.tensorcore.operators import pick

ADMIT_SHARE = 16  # prompts are admitted once a sixteenth of the seats is free: few steps of many, not many of few


@dataclass(slots=True, kw_only=True, eq=False)
class Job:
    """One prompt and how many tokens to add; what came of it."""

    prompt: Sequence[int]
    tokens: int
    out: list[int] = field(default_factory=list)
    first_s: float = 0.0  # seconds from the start of `generate` until its first and last token were on the host
    last_s: float = 0.0
    seat: int = -1
    begun: int = 0  # tokens picked so far, on the device
    pages: list[int] = field(default_factory=list)


class Generator:
    """Seats and pages over one arithmetic; nothing is left behind by `generate`."""

    def __init__(self, arithmetic: TensorCoreArithmetic) -> None:
        """Raises ValueError for an arithmetic without recorded steps, or for more seats than those have."""
        if arithmetic.graphs is None or arithmetic.graphs.seats < arithmetic.engine.max_num_seqs:
            raise ValueError("generation needs a started arithmetic (`start.open_source`) and max_num_seqs up to 256")
        self.arithmetic, self.graphs = arithmetic, arithmetic.graphs
        engine = arithmetic.engine
        self._size, self.budget, self.seats = engine.page_size, engine.max_num_batched_tokens, engine.max_num_seqs
        self.free = list(range(engine.num_pages - 1, -1, -1))
        self.prefill_steps = self.decode_steps = 0

    def generate(self, jobs: Sequence[Job]) -> float:
        """Runs all jobs; returns seconds. Raises ComputeError."""
        with torch.inference_mode():
            return _Run(self, jobs).finish()

    def needed(self, job: Job) -> int:
        """Pages for the whole of a job; the last token is never stored."""
        return -(-(len(job.prompt) + job.tokens - 1) // self._size)


class _Run:
    """One call of `generate`."""

    def __init__(self, generator: Generator, jobs: Sequence[Job]) -> None:
        self.g, self.a, self.graphs = generator, generator.arithmetic, generator.graphs
        self.waiting = deque(jobs)
        self.seats: list[Job | None] = [None] * generator.seats
        self.table = np.zeros(tuple(self.graphs.pages.shape), np.int32)
        self.pending: deque[tuple[torch.Tensor, torch.cuda.Event, list[tuple[int, Job]]]] = deque()
        self.changed = True
        self.start = time.perf_counter()

    def finish(self) -> float:
        while self.waiting or any(self.seats) or self.pending:
            admitted = self._admit()
            if admitted:
                self._prefill(admitted)
            elif any(self.seats):
                self._decode()
            while len(self.pending) > (1 if self.waiting or any(self.seats) else 0):
                self._collect()
        return time.perf_counter() - self.start

    def _admit(self) -> list[Job]:
        """Waiting jobs that fit into seats, pages and one step's tokens; whole prompts."""
        budget, admitted = self.g.budget, list[Job]()
        empty = [seat for seat, job in enumerate(self.seats) if job is None]
        if len(empty) < min(len(self.waiting), len(self.seats) // ADMIT_SHARE):
            return admitted
        while self.waiting and empty and len(self.waiting[0].prompt) <= budget:
            job = self.waiting[0]
            if self.g.needed(job) > len(self.g.free):
                break
            self.waiting.popleft()
            job.seat, job.out, job.begun = empty.pop(0), [], 0
            job.pages = [self.g.free.pop() for _ in range(self.g.needed(job))]
            self.table[job.seat, : len(job.pages)] = job.pages
            self.seats[job.seat] = job
            budget -= len(job.prompt)
            admitted.append(job)
        if not admitted and self.waiting and not any(self.seats) and not self.pending:
            job = self.waiting[0]
            raise ComputeError(
                f"a prompt of {len(job.prompt)} tokens and {job.tokens} more: needs {self.g.needed(job)} pages and one "
                f"step, there are {len(self.g.free)} pages and steps of {self.g.budget} tokens"
            )
        return admitted

    def _prefill(self, jobs: list[Job]) -> None:
        lengths = [len(job.prompt) for job in jobs]
        most = max(len(job.pages) for job in jobs)
        batch = StepBatch(
            token=np.concatenate([np.asarray(job.prompt, np.int32) for job in jobs]),
            sequence=np.repeat(np.arange(len(jobs), dtype=np.int32), lengths),
            position=np.concatenate([np.arange(length, dtype=np.int32) for length in lengths]),
            page_table=self.table[[job.seat for job in jobs], :most],
            wanted=(np.cumsum(lengths) - 1).astype(np.int32),
        )
        picked = torch.empty(len(jobs), dtype=torch.int32, device=self.a.device)
        pick(self.a.prefill(batch), picked)
        seats = to_device(np.array([job.seat for job in jobs], np.int32), self.a.device).long()
        self.graphs.token.index_copy_(0, seats, picked)
        self._picked(picked, list(enumerate(jobs)))
        self.changed = True
        self.g.prefill_steps += 1

    def _decode(self) -> None:
        active = [(seat, job) for seat, job in enumerate(self.seats) if job is not None]
        longest = max(len(job.prompt) + job.begun for _, job in active)
        count = active[-1][0] + 1
        graph, _ = self.graphs.graph(count, longest)
        if self.changed:
            position = np.full(self.graphs.seats, -1, np.int32)
            for seat, job in active:
                position[seat] = len(job.prompt) + job.begun - 1
            self.graphs.position.copy_(host(position, self.a.device), non_blocking=True)
            self.graphs.pages.copy_(host(self.table, self.a.device), non_blocking=True)
            self.changed = False
        graph.replay()
        self._picked(self.graphs.token[:count], active)
        self.g.decode_steps += 1

    def _picked(self, token: torch.Tensor, owners: list[tuple[int, Job]]) -> None:
        """Queues a step's picks for the host; jobs that have all they asked for leave at once."""
        host = torch.empty(len(token), dtype=torch.int32, pin_memory=True)
        host.copy_(token, non_blocking=True)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        self.pending.append((host, event, owners))
        for _, job in owners:
            job.begun += 1
            if job.begun == job.tokens:
                self.seats[job.seat] = None
                self.g.free += reversed(job.pages)
                self.changed = True

    def _collect(self) -> None:
        host, event, owners = self.pending.popleft()
        event.synchronize()
        now, values = time.perf_counter() - self.start, host.tolist()
        for index, job in owners:
            if values[index] < 0:
                raise ComputeError(f"generated position {len(job.out)}: a logit is no finite number")
            job.out.append(values[index])
            job.first_s = job.first_s or now
            job.last_s = now
