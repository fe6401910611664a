"""The bundled engine as a trainer sees its samples: forced texts under a training-style forward of the same weights.

It generates nothing. Rules: only forced paths are taken; picks, candidates and finish reasons come from the engine's
own sampler over the trainer's logits, so that nothing but the logits is another's; there are no steps to show.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, cast

from engines.bundled.engine import Engine
from engines.bundled.errors import NotSupported
from engines.bundled.models.catalogue import open_source
from engines.bundled.training import Text, TrainingForward
from engines.bundled_adapter import harness_errors
from engines.bundled_lifetime import BundledLifetime, start_lifetime
from engines.bundled_traces import Row, write_traces
from engines.bundled_work import prepare
from harness.engine import Progress, Scalar, TimedSession, Work
from harness.errors import Unsupported
from harness.request import Request
from harness.traces import Traces


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrainerLifetime(BundledLifetime):
    """A started trainer; implements `harness.engine.Engine` for golden replay alone."""

    forward: TrainingForward
    layout: str

    def resolved(self) -> Mapping[str, Scalar]:
        """As the engine whose samples are scored, and which layout scores them."""
        return {**BundledLifetime.resolved(self), "trainer": self.layout}

    def observed(self) -> Mapping[str, Scalar]:
        """As the engine's, and the layout that was at work."""
        return {**BundledLifetime.observed(self), "trainer": self.layout}

    def open_timed(self, requests: Sequence[Request]) -> TimedSession:  # noqa: ARG002 - refused whatever they are
        """Raises Unsupported."""
        raise Unsupported(f"trainer={self.layout}: a trainer serves nobody")

    def generate(self, work: Work, progress: Progress) -> Traces:
        """Scores one work's forced texts. Raises EngineError, Unsupported."""
        with harness_errors():
            return _score(self.engine, self.forward, work, progress)


def start_trainer(model_name: str, settings: Mapping[str, Scalar]) -> TrainerLifetime:
    """Opens the model twice: as the engine that sampled, and as the trainer. Raises NotSupported, ModelError."""
    layout = cast("Literal['padded', 'packed']", settings["trainer"])
    if settings["device"] != "cpu" or cast("int", settings["tensor_parallel_size"]) > 1:
        raise NotSupported(f"trainer={layout}: the training forward runs on one CPU process; use device=cpu")
    import torch

    torch.set_num_threads(cast("int", settings["threads"]))
    base = start_lifetime(model_name, settings)
    forward = TrainingForward(open_source(model_name).model(), layout)
    parts = {field.name: getattr(base, field.name) for field in dataclasses.fields(base)}
    return TrainerLifetime(**parts, forward=forward, layout=layout)


def _score(engine: Engine, forward: TrainingForward, work: Work, progress: Progress) -> Traces:
    if work.replay != "golden":
        raise NotSupported("a trainer scores texts and generates none: ask for golden replay in the variant arm")
    requests = {one.id: one for one in work.requests}
    prepared = prepare(work, requests)
    order = [(arrival, request) for arrival in work.schedule.arrivals for request in prepared[arrival.request]]
    begun = time.perf_counter()
    rows: list[Row] = []
    texts = [_text(request.prompt, request.forced) for _, request in order]
    for (arrival, request), logits in zip(order, forward.logits(texts), strict=True):
        sequence = engine.score(request, logits, forward.log_softmax(logits))
        now = time.perf_counter() - begun
        rows.append(Row(sequence, arrival.companion, 0.0, now, now))
        progress(len(rows), sum(row.sequence.generated for row in rows))
    return dataclasses.replace(write_traces(engine, rows), steps=None, counters=())


def _text(prompt: tuple[int, ...], forced: tuple[int, ...] | None) -> Text:
    """The logits of the last prompt token and of every output but the last are wanted."""
    if forced is None:
        raise NotSupported("a trainer has no text for companions: they are not forced along anything")
    return Text((*prompt, *forced[:-1]), len(prompt) - 1, len(prompt) + len(forced) - 1)
