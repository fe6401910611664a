"""The engine: requests go in, each step moves them on, reported positions come out.

It does not know the harness, corpora or files. Rules: a step is schedule, run, postprocess; what a request
gets depends on its own tokens alone; what was run is written down as it was run; a row of logits that holds
NaN or infinity stops the engine with the request and position named.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from collections.abc import Sequence as Numbers
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from engines.bundled.ahead import Ahead
from engines.bundled.batch import Arithmetic, StepBatch
from engines.bundled.config import EngineConfig, Float32, Int32, ModelConfig
from engines.bundled.draft import Drafter, ForcedDrafter, propose_scored
from engines.bundled.errors import ComputeError, NotSupported, RequestError
from engines.bundled.fast import FastPath
from engines.bundled.faults import SHARED_SAMPLING, SHIFTED_MASKS, SHORT_HASH, UNVERIFIED, shift_masks, spoil_batch
from engines.bundled.grammar import Grammars
from engines.bundled.kernels.interface import SamplerKernels
from engines.bundled.logits import Asked, HostLogits, LogitRow, Reports, StepLogits
from engines.bundled.pages import Pages
from engines.bundled.parallel.handover import Inbox, Outbox
from engines.bundled.prefix import Origin, PrefixCache
from engines.bundled.request import Request, check_request
from engines.bundled.sampler import Draws, few, pick, pick_from
from engines.bundled.scheduler import Scheduler, Slice
from engines.bundled.sequence import Decode, Position, Sequence

UNUSED_PAGE = -1  # fills page tables past a sequence's end; never read


@dataclass(frozen=True, slots=True)
class Ran:
    """One row of the step log: tokens [start, start + count) of a sequence ran in a step."""

    step: int
    sequence: Sequence
    start: int
    count: int


class Engine:
    """Continuous batching over one model. Single-threaded: the caller drives it step by step."""

    def __init__(
        self,
        model: ModelConfig,
        config: EngineConfig,
        arithmetic: Arithmetic,
        kernels: SamplerKernels,
        decode: Decode,
        page_order: Numbers[int] | None = None,
        model_digest: str = "",
        drafter: Drafter | ForcedDrafter | None = None,
        fast: FastPath | None = None,
        grammars: Grammars | None = None,
    ) -> None:
        """`page_order` is the order in which fresh pages are handed out; ascending by default.

        `model_digest` is part of the prefix cache's keys: without one they mean nothing outside this engine. Without
        `grammars` a request with one is refused.
        """
        self.model = model
        self.config = config
        self.step_index = 0
        self.log: list[Ran] = []
        self.most_running = 0
        self.origin = Origin(
            model=model_digest, arithmetic=config.arithmetic, definition=arithmetic.definition, tuning=config.tuning,
            page_size=config.page_size,
        )  # fmt: skip
        self.cache = PrefixCache(self.origin, chained=config.fault != SHORT_HASH) if config.prefix_cache else None
        self.scheduler = Scheduler(config, Pages(config.num_pages, config.page_size, page_order), self.cache)
        self.ahead = Ahead(self.scheduler) if config.async_scheduling else None
        self.drafter = drafter
        self.fast = fast
        self.draws = Draws(config)
        self.observed_rows = 0  # rows of logits whose log-probabilities were read, since the engine started
        self.arithmetic = arithmetic
        self.grammars = grammars
        self._kernels = kernels
        self._decode = decode
        self.outbox = Outbox(self) if config.disaggregated == "prefill" else None
        self.scheduler.inbox = Inbox(self) if config.disaggregated == "on" else None

    @property
    def has_work(self) -> bool:
        """True while a request waits or runs."""
        return self.scheduler.has_work

    def check(self, request: Request) -> None:
        """Raises RequestError, naming the request, if it cannot be run as written."""
        check_request(request, self.model, self.config)
        if self.grammars is not None:
            self.grammars.check(request)
        elif request.grammar is not None:
            raise RequestError(
                f"request {request.id!r}: has a grammar, and this engine was started without a tokenizer"
            )

    def submit(self, request: Request) -> Sequence:
        """Puts a request in line. Raises RequestError, naming it, if it cannot be run as written."""
        sequence = self._start(request)
        self.scheduler.add(sequence)
        sequence.fast = self.fast is not None and not request.scored and self.fast.covers(sequence)
        return sequence

    def score(self, request: Request, logits: Float32, logprobs: Float32) -> Sequence:
        """A forced request as reported over logits and log-probabilities (N, vocab) that were computed elsewhere.

        Raises RequestError, and ComputeError for logits that are no numbers or not one row per forced token.
        """
        sequence = self._start(request)
        if len(logits) != len(request.forced or ()):
            raise ComputeError(f"request {request.id!r}: {len(logits)} rows of logits for its forced path", request.id)
        held = HostLogits(logits, self._kernels, lambda _: logprobs)
        self._check_numbers(held, [sequence] * len(logits))
        for index in range(len(logits)):
            sequence.append(self._report(sequence, held.row(index), sequence))
        return sequence

    def abort(self, request_id: str) -> int:
        """Takes the unfinished sequences of a request out between steps and gives their pages back.

        Returns how many there were: 0 if the request is not here, or over. They keep no finish reason.
        """
        found = [sequence for sequence in self.scheduler.unfinished if sequence.request.id == request_id]
        for sequence in found:
            self.scheduler.abort(sequence)
        return len(found)

    def step(self) -> list[Sequence]:
        """Runs one step; returns the sequences that finished in it.

        Raises ComputeError for logits that are no numbers, and when memory runs out.
        """
        self._propose()
        planned = self.ahead.take() if self.ahead else []
        slices = self.scheduler.complete(planned) if planned else self.scheduler.schedule()
        if not slices:  # the fast path holds everybody
            self.step_index += 1
            return []
        batch = build_batch(slices)
        if self.config.fault != "none":
            batch = spoil_batch(batch, slices, self.config.fault, self.config.page_size, ahead=bool(planned))
        logits = self._forward(batch, slices)
        self._write_down(slices)
        finished = self._postprocess(slices, logits)
        self.step_index += 1
        return finished

    def recover(self) -> None:
        """After a step that raised: whatever ran is recomputed from its tokens, which are all as they were reported."""
        if self.ahead:
            self.ahead.drop_plan()
        self.scheduler.requeue()

    def require_cache(self) -> PrefixCache:
        """The prefix cache. Raises NotSupported if the engine runs without one."""
        if self.cache is None:
            raise NotSupported("the engine runs without a prefix cache; set prefix_cache")
        return self.cache

    def idle_until(self, step: int) -> None:
        """Moves the step counter on without running anything: nothing was there to run."""
        self.step_index = max(self.step_index, step)

    def reset(self) -> None:
        """Forgets requests, log and counters, as after a start; every page comes back. The prefix cache stays."""
        if self.ahead:
            self.ahead.reset()
        self.scheduler.abandon()
        self.scheduler.preemptions = self.scheduler.gave_way = 0
        if self.fast:
            self.fast.tokens = 0
        self.step_index = 0
        self.most_running = 0
        self.log.clear()

    def check_pages(self) -> None:
        """Raises ComputeError if pages are still held though nothing runs."""
        pages = self.scheduler.pages
        if not self.has_work and pages.free != pages.count:
            msg = f"{pages.count - pages.free} of {pages.count} KV pages are still held though no request runs"
            raise ComputeError(msg)

    def _start(self, request: Request) -> Sequence:
        """The sequence of a request, in nobody's line yet."""
        self.check(request)
        eos = () if request.sampling.ignore_eos else self.model.eos_token_ids
        stop_ids = frozenset((*request.sampling.stop_token_ids, *eos))
        constraint = self.grammars.start(request) if self.grammars else None
        return Sequence(request, stop_ids, self._decode, constraint)

    def _propose(self) -> None:
        if self.fast:
            with self._memory_errors("the fast path"):
                self.fast.advance(self.scheduler)
        propose_scored(self.scheduler.unfinished)
        if self.drafter:
            self.drafter.propose(self.scheduler.unfinished)

    def _forward(self, batch: StepBatch, slices: list[Slice]) -> StepLogits:
        asked = ask(slices, softmax=self.config.observer != "none")

        def run() -> StepLogits:
            if isinstance(self.arithmetic, Reports) and self.arithmetic.can_report:
                return self.arithmetic.report(batch, asked)
            return HostLogits(self.arithmetic.forward(batch), self._kernels, self.arithmetic.log_softmax)

        with self._memory_errors(f"{len(batch.token)} tokens in {len(slices)} sequences"):
            return self.ahead.run(run, slices) if self.ahead else run()

    @contextmanager
    def _memory_errors(self, what: str) -> Iterator[None]:
        try:
            yield
        except MemoryError as error:
            msg = (
                f"step {self.step_index} of {what}: memory ran out ({error}); "
                "lower max_num_batched_tokens or max_num_seqs"
            )
            raise ComputeError(msg) from error

    def _write_down(self, slices: list[Slice]) -> None:
        self.log += [Ran(self.step_index, piece.sequence, piece.start, piece.count) for piece in slices]
        self.most_running = max(self.most_running, len(slices))

    def _postprocess(self, slices: list[Slice], logits: StepLogits) -> list[Sequence]:
        """Takes the logits (W, vocab) of the slices that reached their sequence's newest token."""
        complete = [piece.sequence for piece in slices if piece.completes]
        wanted = [piece.wanted for piece in slices if piece.completes]
        owners = [sequence for sequence, rows in zip(complete, wanted, strict=True) for _ in range(rows)]
        for piece in slices:
            piece.sequence.land(piece.count)
        self._check_numbers(logits, owners)
        for piece in slices:
            self.scheduler.publish(piece.sequence)
        if not complete:
            return []
        if self.config.fault == SHIFTED_MASKS:
            shift_masks(complete)
        ends = np.cumsum(wanted)
        for sequence, begin, end in zip(complete, ends - wanted, ends, strict=True):
            leader = complete[0] if self.config.fault == SHARED_SAMPLING else sequence
            self._verify(sequence, [logits.row(index) for index in range(begin, end)], leader)
        finished = [sequence for sequence in complete if sequence.finish_reason is not None]
        for sequence in finished:
            if self.outbox is not None:
                self.outbox.keep(sequence)
            self.scheduler.finish(sequence)
        return finished

    def _verify(self, sequence: Sequence, rows: list[LogitRow], leader: Sequence) -> None:
        """Takes the 1 + proposals rows as long as each proposal is what the engine takes itself."""
        taken = 0
        for row in rows:
            sequence.append(self._report(sequence, row, leader))
            taken += 1
            if not sequence.accept_draft():
                break
        sequence.drafted += len(rows) - 1
        sequence.accepted += taken - 1

    def _check_numbers(self, logits: StepLogits, sequences: list[Sequence]) -> None:
        """Raises ComputeError naming the first sequence and position whose logits (W, vocab) are not all finite."""
        if logits.shape != (expected := (len(sequences), self.model.vocab_size)):
            msg = f"the arithmetic returned logits of shape {logits.shape}, expected {expected}"
            raise ComputeError(msg)
        bad = logits.first_bad() if sequences else -1
        if bad >= 0:
            row = logits.row(bad).logits()
            token = int(np.argmin(np.isfinite(row)))
            msg = (
                f"request {sequences[bad].request.id!r}, generated position {sequences[bad].generated}: "
                f"logit of token {token} is {row[token]}; expected a finite number"
            )
            raise ComputeError(msg, sequences[bad].request.id)

    def _report(self, sequence: Sequence, row: LogitRow, leader: Sequence) -> Position:
        """One position from a row of raw logits. The top k is sorted on logits."""
        own = self._pick(row, sequence, leader)
        token = own if sequence.forced_token is None else sequence.forced_token
        if self.config.fault == UNVERIFIED and sequence.drafts and sequence.fast is (self.fast is not None):
            token = sequence.drafts[0]
        if self.config.fault == "none" and not sequence.permits(token):
            place = f"request {sequence.request.id!r}, generated position {sequence.generated}"
            raise ComputeError(f"{place}: token {token} was taken against the grammar", sequence.request.id)
        silent = self.config.observer == "none"
        top = row.top(0 if silent else sequence.request.sampling.logprobs)
        digest = None
        if sequence.request.logits_digest:
            digest = hashlib.blake2b(row.logits().tobytes(), digest_size=16).digest()
        if silent:
            return Position(token, own, math.nan, top, np.empty(0, np.float32), digest)
        logprobs = row.logprobs(np.array([token, *top], np.int32))
        self.observed_rows += 1
        return Position(token, own, float(logprobs[0]), top, logprobs[1:], digest)

    def _pick(self, row: LogitRow, sequence: Sequence, leader: Sequence) -> int:
        """The sampler's own token; counts where a grammar's mask was at work, and where it made a difference."""
        if sequence.masker is None:
            return pick_from(row, leader, self._kernels, self.draws)
        logits = row.logits()
        token = pick(logits, leader, self._kernels, self.draws, sequence.masker.allowed())
        sequence.masked += 1
        sequence.steered += token != pick(logits, leader, self._kernels, self.draws)
        return token


def build_batch(slices: list[Slice]) -> StepBatch:
    """Flat tokens of the slices, one page-table row per slice."""
    counts = [piece.count for piece in slices]
    ends = np.cumsum(counts)
    return StepBatch(
        token=_int32([token for s in slices for token in s.sequence.line[s.start : s.start + s.count]]),
        sequence=np.repeat(np.arange(len(slices), dtype=np.int32), counts),
        position=_int32([position for s in slices for position in range(s.start, s.start + s.count)]),
        page_table=_page_table([piece.sequence.pages for piece in slices]),
        wanted=_int32([row for end, s in zip(ends, slices, strict=True) for row in range(end - s.wanted, end)]),
    )


def ask(slices: list[Slice], *, softmax: bool) -> Asked:
    """What the rows of these slices will be asked for: candidates, and the tokens of forced paths."""
    most, ids = 0, list[int]()
    for piece in slices:
        request, done = piece.sequence.request, piece.sequence.generated
        if piece.wanted:
            most = max(most, request.sampling.logprobs if softmax else 0, few(request.sampling))
        path = request.forced or ()
        ids += [path[done + i] if done + i < len(path) else 0 for i in range(piece.wanted)]
    return Asked(most=most, ids=_int32(ids), softmax=softmax)


def _page_table(pages: list[list[int]]) -> Int32:
    table = np.full((len(pages), max(map(len, pages))), UNUSED_PAGE, np.int32)
    for row, held in zip(table, pages, strict=True):
        row[: len(held)] = held
    return table


def _int32(values: list[int]) -> Int32:
    return np.array(values, np.int32)
