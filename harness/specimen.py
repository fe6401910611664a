"""A small trial made by hand: six captures of one cell that is PASS, for faults to be planted in.

It does not know engines or faults. Rules: everything is built from integers, so that it is the same everywhere; the
step tables and counters are honest; a certain token (0.0) and a tie are among the values, so that a zero's sign and the
order of equals can be changed; the reference runs its requests alone, the variant runs them together with a companion.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from harness.capture import Capture
from harness.cell import parse_cell
from harness.digest import judged_digest
from harness.engine import Field
from harness.expected import Expected
from harness.faults.captures import recount
from harness.plan import Pair
from harness.traces import Float32, Int32, PositionTable, RequestTable, StepTable, Traces

WIDTH = 4  # candidates per position
VOCABULARY = 50
CELL = {
    "name": "specimen",
    "invariant": "What a request gets does not depend on what runs beside it.",
    "corpus": "specimen",
    "rule": "tensors",
    "replay": "golden",
    "axis": {"name": "batch", "reference": "alone", "variants": ["together"]},
    "control": {"mode": "free"},
}
ROLES = ("reference", "floor", "varied", "control_reference", "control_floor", "control_varied")


class Shape(NamedTuple):
    """One request of the specimen: name, prompt tokens, outputs."""

    name: str
    prompt: int
    length: int
    companion: bool = False


SHAPES = (Shape("a", 7, 5), Shape("b", 5, 3), Shape("c", 9, 6), Shape("d", 4, 4))
COMPANION = Shape("companion", 6, 5, companion=True)
WITH_COMPANION = (COMPANION, *SHAPES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """A pair and its six captures, by role."""

    pair: Pair
    reference: Capture
    floor: Capture
    varied: Capture
    control_reference: Capture
    control_floor: Capture
    control_varied: Capture

    @property
    def captures(self) -> dict[str, Capture]:
        """The captures under the case ids that the pair names."""
        return {role: getattr(self, role) for role in ROLES}

    @property
    def expected(self) -> dict[str, tuple[Expected, ...]]:
        """What each capture must hold."""
        alone, together = expected_of(SHAPES), expected_of(WITH_COMPANION)
        return {role: together if role in ("varied", "control_varied") else alone for role in ROLES}


def expected_of(shapes: Sequence[Shape]) -> tuple[Expected, ...]:
    """What the requests of these shapes ask for; each may end early."""
    return tuple(
        Expected(
            id=shape.name, companion=shape.companion, samples=1, prompt_tokens=shape.prompt, max_tokens=shape.length,
            must_fill=False, candidates=WIDTH,
        )
        for shape in shapes
    )  # fmt: skip


def make_trial() -> Trial:
    """A trial that is PASS: equal arms, a witness at nearly every position, a control that fires."""
    cell, mistakes = parse_cell(CELL)
    if cell is None:
        raise ValueError(f"the specimen's cell does not validate: {mistakes}")
    pair = Pair(
        cell=cell, variant="together", label="specimen[alone-together]", owned=(), control_owned=(),
        reference="reference", floor="floor", varied="varied", control_reference="control_reference",
        control_floor="control_floor", control_varied="control_varied",
    )  # fmt: skip
    alone, together = alone_traces(), together_traces()
    return Trial(
        pair=pair,
        reference=make_capture("reference", alone),
        floor=make_capture("floor", alone),
        varied=make_capture("varied", together),
        control_reference=make_capture("control_reference", alone),
        control_floor=make_capture("control_floor", alone),
        control_varied=make_capture("control_varied", shifted(together)),
    )


def make_capture(role: str, traces: Traces) -> Capture:
    """A capture of its own repetition in the one process all of them share."""
    return Capture(
        case=role, traces=traces, requested={"max_num_seqs": 4}, resolved={"max_num_seqs": 4},
        observed={"max_running": dict(traces.counters)["max_running"]},
        subject=(Field(name="model.digest", value="0" * 64, field_class="identity", source="specimen"),),
        process_nonce="process", repetition_nonce=f"repetition of {role}", session="specimen",
        judged_digest=judged_digest(traces), seconds=0.0,
    )  # fmt: skip


def alone_traces(shapes: Sequence[Shape] = SHAPES) -> Traces:
    """One request after the other."""
    rows, step = [], 0
    for j, shape in enumerate(shapes):
        for row in _own_steps(j, shape):
            rows.append((step, *row))
            step += 1
    return _traces(shapes, rows)


def together_traces() -> Traces:
    """All requests and a companion, each arriving a step after the one before; the companion first."""
    shapes = WITH_COMPANION
    rows = [(j + i, *row) for j, shape in enumerate(shapes) for i, row in enumerate(_own_steps(j, shape))]
    return _traces(shapes, sorted(rows, key=lambda row: row[0]))


def shifted(traces: Traces) -> Traces:
    """The same with every logprob an ulp lower, as another arithmetic might have it."""
    table = traces.positions
    if table.logprob is None or table.topk_logprobs is None or table.logits_digest is None:
        return traces
    low = np.float32(-np.inf)
    columns = {
        "logprob": np.nextafter(table.logprob, low),
        "topk_logprobs": np.nextafter(table.topk_logprobs, low),
        "logits_digest": table.logits_digest ^ np.uint64(1),
    }
    return replace(traces, positions=replace(table, **columns))


def _own_steps(j: int, shape: Shape) -> list[tuple[int, int, int]]:
    """(request, start, count): the prompt at once, then one token at a time; the last output is never computed."""
    decode = [(j, shape.prompt + i, 1) for i in range(shape.length - 1)]
    return [(j, 0, shape.prompt), *decode]


def _traces(shapes: Sequence[Shape], rows: Sequence[tuple[int, int, int, int]]) -> Traces:
    table = np.array(rows, dtype=np.int32)
    ids, values = _candidates(shapes)
    steps = StepTable(step=table[:, 0].copy(), request=table[:, 1].copy(), start=table[:, 2].copy(),
                      count=table[:, 3].copy())  # fmt: skip
    positions = PositionTable(
        token=ids[:, 0].copy(), pick=ids[:, 0].copy(), logprob=values[:, 0].copy(), topk_ids=ids, topk_logprobs=values,
        logits_digest=(ids[:, :2].astype(np.uint64) << np.uint64(40)) + np.uint64(7),
    )  # fmt: skip
    return recount(Traces(requests=_requests(shapes), positions=positions, steps=steps, counters=()))


def _requests(shapes: Sequence[Shape]) -> RequestTable:
    none = np.zeros(len(shapes), dtype=np.int32)
    times = np.zeros(len(shapes))
    return RequestTable(
        id=tuple(shape.name for shape in shapes),
        sample=none,
        companion=np.array([shape.companion for shape in shapes], dtype=np.bool_),
        prompt_tokens=np.array([shape.prompt for shape in shapes], dtype=np.int32),
        length=np.array([shape.length for shape in shapes], dtype=np.int64),
        finish_reason=("length",) * len(shapes),
        cached_tokens=none.copy(),
        preemptions=none.copy(),
        arrival_s=times,
        first_token_s=times.copy(),
        finish_s=times.copy(),
    )


def _candidates(shapes: Sequence[Shape]) -> tuple[Int32, Float32]:
    """Lists that depend on the request and the position alone.

    The first candidate of request b's first position is certain (0.0); the last two of request d's last one are tied.
    """
    ids, values = [], []
    for shape in shapes:
        seed = sum(shape.name.encode())
        for position in range(shape.length):
            first = (seed * 31 + position * 17) % VOCABULARY
            listed = [(first + 11 * column) % VOCABULARY for column in range(WIDTH)]
            certain = (shape.name, position) == ("b", 0)
            scores = [-(column * 8 + (0 if certain else 1 + position)) / 16 for column in range(WIDTH)]
            if (shape.name, position) == ("d", shape.length - 1):
                listed[-2:], scores[-1] = sorted(listed[-2:]), scores[-2]
            ids.append(listed)
            values.append(scores)
    return np.array(ids, dtype=np.int32), np.array(values, dtype=np.float32)
