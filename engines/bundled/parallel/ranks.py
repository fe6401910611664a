"""The first rank's side: starts the other ranks, checks that they match, drives each step, ends them.

It does not know requests or scheduling. Rules: every wait has a deadline; an error names the rank that is to blame,
and the last lines it printed; after an error no rank is left; a rank that computes with something else than the
first one does (weights, definition, kernels, threads) is refused before the first step.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import IO, ClassVar, cast

from engines.bundled.batch import StepBatch
from engines.bundled.config import EngineConfig, Float32, Model
from engines.bundled.errors import NotSupported, RankError
from engines.bundled.gpu import check_dtype
from engines.bundled.parallel.cores import OWN, SHARED, deal_cores, pin, usable_cores
from engines.bundled.parallel.layout import lay_out
from engines.bundled.parallel.rank import BROKEN_OFF, START_S, Prepared, describe_library, prepare
from engines.bundled.parallel.wire import CollectiveError, Lines, Message, Silence, flatten, write_line

COLLECTIVE_S = 120.0  # a rank may be this much slower than another in one layer of one step
GRACE_S = 2.0  # for ranks to end by themselves
TAIL_LINES = 8


class RankProcess:
    """One other rank."""

    def __init__(self, rank: int, environment: Mapping[str, str] | None = None) -> None:
        """Starts the process; it waits for its first command."""
        self.rank = rank
        read, write = os.pipe()
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
        self._process = subprocess.Popen(  # noqa: S603 - our own interpreter and module
            [sys.executable, "-P", "-m", "engines.bundled.parallel.rank", str(write)], stdin=subprocess.PIPE,
            stdout=self._log, stderr=self._log, pass_fds=(write,),
            env={**os.environ, "PYTHONPATH": _search_path(), **(environment or {})},
        )  # fmt: skip
        os.close(write)
        self._answers = os.fdopen(read, "rb", buffering=0)
        self._lines = Lines(self._answers)

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    @property
    def name(self) -> str:
        """What errors call it."""
        return f"rank {self.rank} (process {self.pid})"

    def tell(self, message: Message) -> None:
        """Sends a command. Raises CollectiveError when the process is gone."""
        try:
            write_line(cast("IO[bytes]", self._process.stdin), message)
        except BrokenPipeError:
            raise CollectiveError(f"{self.name} takes no more commands") from None

    def answer(self, event: str, deadline_s: float) -> Message:
        """Its next answer. Raises RankError when it is another one, or none within `deadline_s`."""
        try:
            message = self._lines.read(deadline_s)
        except Silence:
            raise RankError(f"{self.name}: no answer within {deadline_s:.0f} s") from None
        if message is None:
            raise RankError(f"{self.name} {self._ending(GRACE_S)}{self._tail()}")
        if message["event"] != event:
            raise RankError(f"{self.name}: {message.get('message', message)}{self._tail()}")
        return message

    def wait(self, seconds: float) -> int | None:
        """Its exit status, None while it runs on."""
        try:
            return self._process.wait(max(0.0, seconds))
        except subprocess.TimeoutExpired:
            return None

    def blame(self) -> str | None:
        """Why this rank is lost; None if it was only left alone by another one. To be asked once it had time to end."""
        status = self.wait(0)
        if status == BROKEN_OFF:
            return None
        said = self._last_words()
        why = said if said and status is not None else self._ending(0)
        return f"{self.name} {why}{self._tail()}" if why is not said else f"{self.name}: {why}"

    def dismiss(self) -> None:
        """Tells the process that nothing more comes: it leaves its group and ends."""
        with contextlib.suppress(BrokenPipeError):
            cast("IO[bytes]", self._process.stdin).close()

    def end(self) -> None:
        """Ends the process, whatever it does."""
        self.dismiss()
        if self.wait(GRACE_S) is None:
            self._process.kill()
            self._process.wait()
        self._answers.close()
        self._log.close()

    def _ending(self, seconds: float) -> str:
        status = self.wait(seconds)
        if status is None:
            return "is running, but takes no part"
        if status < 0:
            return f"was ended by signal {signal.Signals(-status).name}"
        return f"ended with status {status}"

    def _last_words(self) -> str | None:
        try:
            while (message := self._lines.read(0)) is not None:
                if message["event"] == "failed":
                    return str(message["message"])
        except Silence:
            pass
        return None

    def _tail(self) -> str:
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").splitlines()[-TAIL_LINES:]
        return "".join(f"\n  {line}" for line in lines)


class Binding:
    """The first rank's process bound to its cores, and back. Several at once share no core."""

    _bound: ClassVar[list[Binding]] = []  # of this process
    _usable: ClassVar[list[int]] = []  # cores it may run on when none is bound

    def __init__(self, ranks: int, threads: int) -> None:
        """Deals cores out to all ranks, and binds nobody yet."""
        if not Binding._bound:
            Binding._usable = usable_cores()
        taken = {core for binding in Binding._bound for cores in binding.cores for core in cores}
        free = [core for core in Binding._usable if core not in taken]
        self.cores: tuple[tuple[int, ...], ...] = deal_cores(free, ranks, threads)
        self.words = OWN if self.cores[0] else SHARED

    def bind(self) -> None:
        """Binds this process to the first rank's cores, beside those of other bindings."""
        if self.cores[0]:
            Binding._bound.append(self)
            Binding._settle()

    def undo(self) -> None:
        """Gives the cores back; after the last binding this process runs where it did before the first."""
        if self in Binding._bound:
            Binding._bound.remove(self)
            Binding._settle()

    @staticmethod
    def _settle() -> None:
        pin([core for binding in Binding._bound for core in binding.cores[0]] or Binding._usable)


class ParallelArithmetic:
    """All ranks behind one call, from the first one's process; implements `batch.Arithmetic`."""

    def __init__(
        self, prepared: Prepared, others: Sequence[RankProcess], port: int, deadline_s: float, binding: Binding
    ) -> None:
        """The ranks are ready and match. Raises RankError when they do not come together; ends them then."""
        self._others, self._config, self._binding = tuple(others), prepared.config, binding
        self._broken: str | None = None
        from engines.bundled.parallel.group import Group, open_store

        try:
            for other in others:
                other.answer("imported", START_S)  # so that all are at hand when the deadline counts
            store = open_store(port, len(others) + 1, START_S)
            for other in others:
                other.tell({"do": "join", "port": store.port})
            self._group = Group(store, 0, len(others) + 1, self._config.collectives, deadline_s, self._watch)
            self._local = prepared.join(self._group)
            for other in others:
                other.answer("joined", START_S)
        except CollectiveError as error:
            raise self._lost(error) from error
        except BaseException:
            self._end_others()
            raise
        self.name, self.definition = self._local.name, self._local.definition

    def forward(self, batch: StepBatch) -> Float32:
        """Logits (W, vocab_size). Raises RankError naming the rank that is lost; every later call repeats it."""
        if self._broken is not None:
            raise RankError(self._broken)
        try:
            sizes, numbers = flatten(batch)
            for other in self._others:
                other.tell({"do": "step", "sizes": sizes})
            self._group.broadcast(numbers)
            return self._local.forward(batch)
        except CollectiveError as error:
            raise self._lost(error) from error
        except BaseException as error:  # the others are in the middle of a step that nobody will finish
            self._broken = f"the first rank broke a step off ({error!r}), so the ranks were ended"
            self._end_others()
            raise

    def log_softmax(self, logits: Float32) -> Float32:
        """At the first rank, over the gathered logits."""
        return self._local.log_softmax(logits)

    def describe(self) -> dict[str, str | int | float | bool]:
        """The first rank's account and the topology; threads are each rank's."""
        collectives = describe_library(self._config.collectives)
        return {**self._local.describe(), "collectives": collectives, "rank_cores": self._binding.words}

    def counts(self) -> tuple[Mapping[str, int], ...]:
        """What each rank says of itself. Raises RankError when one does not answer."""
        if self._broken is not None:
            raise RankError(self._broken)
        try:
            for other in self._others:
                other.tell({"do": "count"})
        except CollectiveError as error:
            raise self._lost(error) from error
        answers = [cast("Mapping[str, int]", other.answer("counted", COLLECTIVE_S)["counts"]) for other in self._others]
        return (*self._local.counts(), *answers)

    def close(self) -> None:
        """Ends the other ranks. All leave the group at the same time: over NCCL each waits there for the others."""
        with ThreadPoolExecutor(1) as pool:
            leaving = pool.submit(self._group.close)
            self._end_others()
            leaving.result()

    def _watch(self) -> None:
        ended = [other.name for other in self._others if other.wait(0) is not None]
        if ended:
            raise CollectiveError(f"{', '.join(ended)} ended")

    def _lost(self, error: CollectiveError) -> RankError:
        """Finds out who is to blame, ends every rank, and remembers."""
        limit = time.monotonic() + GRACE_S
        for other in self._others:
            other.wait(limit - time.monotonic())
        ended = [other for other in self._others if other.wait(0) is not None]
        blamed = [reason for other in ended if (reason := other.blame()) is not None]
        if not blamed:  # nobody ended by itself: whoever still runs has kept the others waiting
            blamed = [reason for other in self._others if (reason := other.blame()) is not None]
        self._broken = "; ".join(blamed) or str(error)
        self._broken = f"of {len(self._others) + 1} ranks, {self._broken}" if blamed else self._broken
        self._end_others()
        return RankError(self._broken)

    def _end_others(self) -> None:
        """Whatever state they are in; this process runs where it did before. All are told before one is waited for."""
        for other in self._others:
            other.dismiss()
        for other in self._others:
            other.end()
        self._binding.undo()


def open_parallel(
    model_name: str, model: Model, config: EngineConfig, *, device: str = "cpu", deadline_s: float = COLLECTIVE_S,
    others: Mapping[int, str] | None = None,
) -> ParallelArithmetic:  # fmt: skip
    """Starts the other ranks, each of which opens the model by its name, and brings all together.

    `device` is one of `gpu.DEVICES`; which card a rank has is said there. Threads of each rank are
    bound to cores of their own where there are enough (`cores`), those of this process until `close`.
    `others` gives single ranks another model, for tests of what happens then.

    Raises:
        NotSupported: an arithmetic or sizes that cannot be run over several ranks.
        RankError: a rank cannot start, or differs from the first one; a port in use.
    """
    _check_split(config, device)
    sizes = config.tensor_parallel_size, config.expert_parallel_size
    if device != "cpu" and model.config.num_experts:
        raise NotSupported(f"device={device} over several ranks: experts are split on CPUs alone; use device=cpu")
    if sizes[1] > 1 and model.config.num_experts < sizes[1]:
        raise NotSupported(f"expert_parallel_size {sizes[1]}: the model has {model.config.num_experts} experts")
    try:
        lay_out(model.config, tensor=sizes[0], expert=sizes[1])
    except ValueError as error:
        raise NotSupported(str(error)) from error
    processes: list[RankProcess] = []
    binding = Binding(max(sizes), config.threads)
    try:
        for rank in range(1, max(sizes)):
            processes.append(RankProcess(rank))
            processes[-1].tell({
                "model": (others or {}).get(rank, model_name), "config": asdict(config), "rank": rank,
                "deadline_s": deadline_s, "device": device, "cores": binding.cores[rank],
            })  # fmt: skip
        binding.bind()
        prepared = prepare(model, config, 0, device)
        importlib.import_module("engines.bundled.parallel.group")  # torch takes long, and the others import it now
        for process in processes:
            _check_match(process, prepared.facts, process.answer("ready", START_S)["facts"])
        return ParallelArithmetic(prepared, processes, config.rendezvous_port, deadline_s, binding)
    except BaseException:
        for process in processes:
            process.end()
        binding.undo()
        raise


def _check_split(config: EngineConfig, device: str) -> None:
    """Raises NotSupported for an arithmetic that is not split over ranks."""
    if config.dtype == "bfloat16" and config.arithmetic in ("tensorcore", "free"):
        check_dtype(config, device)
        if config.k_order != "tree":
            raise NotSupported("dtype bfloat16 over several ranks: sums follow the ranks; set k_order=tree")
        if config.expert_parallel_size > 1:
            raise NotSupported("dtype bfloat16 over several ranks: experts are not split; use float32")
        return
    if config.arithmetic not in ("portable", "free"):
        raise NotSupported(f"arithmetic {config.arithmetic!r} over several ranks: portable and free can be split")
    if config.dtype != "float32":
        raise NotSupported(f"dtype {config.dtype} over several ranks: float32 can be split")


def _search_path() -> str:
    """PYTHONPATH by which another process finds this very package, last: also where it was not installed."""
    paths = [*os.environ.get("PYTHONPATH", "").split(os.pathsep), str(Path(__file__).resolve().parents[3])]
    return os.pathsep.join(dict.fromkeys(path for path in paths if path))


def _check_match(process: RankProcess, mine: Mapping[str, str | int], theirs: object) -> None:
    found = cast("Mapping[str, str | int]", theirs)
    different = [
        f"{name}: expected {mine[name]!r}, found {found.get(name)!r}" for name in mine if found.get(name) != mine[name]
    ]
    if different:
        raise RankError(f"{process.name} does not match the first rank: {'; '.join(different)}")
