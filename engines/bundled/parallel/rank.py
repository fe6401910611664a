"""The process of every rank but the first: loads its shard, joins the group, runs each step with the others.

It does not know requests or scheduling. Rules: one command, one line; when standard input ends, the first rank is
gone and so is this process; whatever goes wrong is said in one answer and ends the process; a collective that breaks
off ends it with BROKEN_OFF, so that the first rank can tell who is to blame from who was left alone.

Run as `python -m engines.bundled.parallel.rank FD`, FD being where answers go.
"""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from typing import IO, TYPE_CHECKING, cast

from engines.bundled.arithmetic.order import DEFINITION
from engines.bundled.config import EngineConfig, Model
from engines.bundled.kernels.interface import Kernels
from engines.bundled.kernels.library import load
from engines.bundled.kernels.selfcheck import check_environment
from engines.bundled.models.catalogue import open_source
from engines.bundled.parallel.cores import pin
from engines.bundled.parallel.layout import Part, lay_out
from engines.bundled.parallel.pieces import take_shard
from engines.bundled.parallel.shard import ShardArithmetic
from engines.bundled.parallel.wire import CollectiveError, Lines, empty_step, unflatten, write_line

if TYPE_CHECKING:
    from engines.bundled.gpu.tensorcore.rank import RankArithmetic, TensorCoreCard
    from engines.bundled.parallel.card import CardArithmetic
    from engines.bundled.parallel.card_start import Card
    from engines.bundled.parallel.group import Group

START_S = 600.0  # for whatever a rank does before its first step, each
BROKEN_OFF = 3  # exit status of a rank whose collective broke off


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Prepared:
    """A rank that has packed its shard and not joined the others yet."""

    model: Model
    config: EngineConfig
    kernels: Kernels
    rank: int
    parts: tuple[Part, ...]
    card: Card | TensorCoreCard | None  # None: it computes on the CPU

    @property
    def facts(self) -> dict[str, str | int]:
        """What must be the same at every rank, or the bits mean nothing."""
        portable = self.config.arithmetic == "portable"
        return {
            "model digest": self.model.digest,
            "arithmetic": self.config.arithmetic,
            "definition": DEFINITION if portable else 0,
            "kernels digest": self.kernels.digest,
            "instruction set": self.kernels.isa,
            "threads": self.config.threads,
            "collectives": describe_library(self.config.collectives),
            **(self.card.facts if self.card else {"device": "cpu"}),
        }

    def join(self, group: Group) -> ShardArithmetic | CardArithmetic | RankArithmetic:
        """Packs the shard and becomes part of the group's arithmetic. Raises NotSupported, GpuMemoryError."""
        if self.card is not None:
            return self.card.join(self.model, self.config, self.kernels, self.parts, group)
        shard = take_shard(self.model, self.parts, self.rank, self.kernels, self.config)
        return ShardArithmetic(self.model, self.config, self.kernels, shard, self.parts, group)


def describe_library(backend: str) -> str:
    """What carries the collectives; NCCL comes with torch."""
    return f"{backend} of torch {version('torch')}"


def prepare(model: Model, config: EngineConfig, rank: int, device: str) -> Prepared:
    """Loads kernels and checks this process's floating-point environment.

    Raises:
        KernelError: no kernels can be had here.
        NotSupported: no card for this rank, or a model that the GPU kernels do not compute.
    """
    check_environment()
    parts = lay_out(model.config, tensor=config.tensor_parallel_size, expert=config.expert_parallel_size)
    card: Card | TensorCoreCard | None = None
    if config.dtype == "bfloat16":
        from engines.bundled.gpu.tensorcore.rank import open_tensorcore_card

        card = open_tensorcore_card(model.config, config, rank)
    elif device != "cpu":
        from engines.bundled.parallel.card_start import open_card

        card = open_card(model.config, config, parts[rank], device)
    kernels = load(config.isa, config.compiler)
    return Prepared(model=model, config=config, kernels=kernels, rank=rank, parts=parts, card=card)


def main() -> int:
    """Serves the first rank until it is gone. After an error the process ends at once: a broken group may keep it."""
    answers = os.fdopen(int(sys.argv[1]), "wb")
    try:
        return _serve(Lines(open(0, "rb", buffering=0)), answers)
    except CollectiveError as error:
        _say(answers, {"event": "failed", "message": str(error)})
        os._exit(BROKEN_OFF)
    except Exception as error:  # noqa: BLE001 - the process's edge: the first rank turns it into its own error
        traceback.print_exc()
        sys.stderr.flush()
        _say(answers, {"event": "failed", "message": f"{type(error).__name__}: {error}"})
        os._exit(1)


def _watch_parent(first: int) -> Callable[[], None]:
    def watch() -> None:
        if os.getppid() != first:
            raise CollectiveError("the first rank is gone")

    return watch


def _say(answers: IO[bytes], message: Mapping[str, object]) -> None:
    with contextlib.suppress(BrokenPipeError):
        write_line(answers, message)


def _serve(lines: Lines, answers: IO[bytes]) -> int:
    start = lines.read(None)
    if start is None:
        return 0
    config = EngineConfig(**cast("dict[str, object]", start["config"]))  # type: ignore[arg-type]
    rank, ranks = cast("int", start["rank"]), max(config.tensor_parallel_size, config.expert_parallel_size)
    pin(cast("list[int]", start["cores"]))
    prepared = prepare(open_source(cast("str", start["model"])).model(), config, rank, cast("str", start["device"]))
    write_line(answers, {"event": "ready", "facts": prepared.facts})
    from engines.bundled.parallel.group import Group, find_store  # it imports torch; the first rank does so meanwhile

    write_line(answers, {"event": "imported"})
    join = lines.read(None)
    if join is None:
        return 0
    deadline_s = cast("float", start["deadline_s"])
    store = find_store(cast("int", join["port"]), ranks, START_S)
    group = Group(store, rank, ranks, config.collectives, deadline_s, _watch_parent(os.getppid()))
    arithmetic = prepared.join(group)
    write_line(answers, {"event": "joined"})
    while (command := lines.read(None)) is not None:
        if command["do"] == "count":
            write_line(answers, {"event": "counted", "counts": arithmetic.counts()[0]})
        else:
            sizes = cast("list[int]", command["sizes"])
            numbers = empty_step(sizes)
            group.broadcast(numbers)
            arithmetic.forward(unflatten(sizes, numbers))
    group.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
