"""The plan: which cases run in which lifetimes, and which of them each pair compares. Data, made before anything runs.

It touches no engine. Rules: every (cell, variant) becomes a pair, judged or refused by name; cases are shared by
content; a case runs after the case it is forced along; what cannot run is planned as unsupported, never left out.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from harness.axis import Axis
from harness.background import FROM_FILE, Background, build_background, read_background
from harness.background import NONE as NO_LOAD
from harness.background import SOURCE as BACKGROUND_SOURCE
from harness.canonical import digest
from harness.case import RESET, Case, Lifetime
from harness.cell import Cell
from harness.corpus import Corpus, check_fits, load_corpus, retokenise, take, with_requests
from harness.engine import RULES, Adapter, AxisSupport, ModelFacts, RefusesByConfiguration, Scalar
from harness.errors import CellError, UsageError
from harness.matrix import Matrix
from harness.prelude import build_prelude
from harness.requires import unmet_requirement
from harness.schedule import Arrival
from harness.schedules import CANCELLED, NO_HISTORY, build_schedule, companion_source
from harness.settings import Settings, mode_settings, resolve
from harness.stages import Stage, order_stages

SEED_OFFSET = "seed_offset"  # the one control key that is no engine setting: added to every seed of the variant arm
SCHEDULE_FIELDS = ("work.schedule", "work.companions")
HISTORY_FIELDS = ("work.prelude",)
Layers = Sequence[tuple[str, Mapping[str, Scalar]]]  # (where it comes from, settings), later ones winning


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """One (cell, variant) with the ids of the cases it is judged by.

    `unsupported` is the reason it cannot run here; then all ids are None. `foreseen` says whether that reason is one
    the cell's `[requires]` or the matrix's allow-list names.
    """

    cell: Cell
    variant: Scalar
    label: str  # "max-num-seqs[1-8]"
    owned: tuple[str, ...]  # fingerprint fields that may differ between the arms
    control_owned: tuple[str, ...]
    reference: str | None = None
    floor: str | None = None
    varied: str | None = None
    control_reference: str | None = None
    control_floor: str | None = None
    control_varied: str | None = None
    unsupported: str | None = None
    foreseen: bool = False

    @property
    def cases(self) -> tuple[str, ...]:
        """Ids of all cases this pair needs, in order of use."""
        ids = (self.reference, self.floor, self.varied,
               self.control_reference, self.control_floor, self.control_varied)  # fmt: skip
        return tuple(dict.fromkeys(case for case in ids if case is not None))


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Everything a run will do."""

    matrix: Matrix
    engine: str
    model: str
    settings: Settings
    pairs: tuple[Pair, ...]
    cases: Mapping[str, Case]
    stages: tuple[Stage, ...]
    corpora: Mapping[tuple[str, str], Corpus]  # (model, corpus name) to the corpus in that model's tokens
    backgrounds: Mapping[str, Background] = field(default_factory=dict)  # by name
    chosen: frozenset[str] = frozenset()  # settings that a mode or `--set` named; the others are the engine's defaults

    @property
    def counts(self) -> dict[str, int]:
        """How much is planned."""
        cells = {pair.cell.name for pair in self.pairs}
        return {
            "cells": len(cells),
            "pairs": len(self.pairs),
            "cases": len(self.cases),
            "lifetimes": len(self.stages),
        }

    @property
    def digest(self) -> str:
        """SHA-256 over what will be run and judged."""
        labels = [pair.label for pair in self.pairs]
        return digest([self.matrix.digest, self.engine, self.model, sorted(self.cases), labels])

    def only(self, labels: Sequence[str]) -> Plan:
        """The part of the plan that the named pairs need."""
        pairs = tuple(pair for pair in self.pairs if pair.label in labels)
        wanted = {case for pair in pairs for case in pair.cases}
        cases = {case: self.cases[case] for case in self.cases if case in wanted}
        return replace(self, pairs=pairs, cases=cases, stages=order_stages(cases))


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """What the command line chose: engine, model, and settings over the defaults."""

    adapter: Adapter
    model: str
    overrides: Mapping[str, Scalar]


def make_plan(matrix: Matrix, subject: Subject, *, environ_cores: int | None = None) -> Plan:
    """Plans a matrix on an engine. Raises UsageError (cell, corpus, model, setting), before anything runs."""
    planner = _Planner(matrix, subject, environ_cores or len(os.sched_getaffinity(0)))
    pairs = tuple(planner.pair(cell, value) for cell in matrix.cells for value in cell.variants)
    labels = [pair.label for pair in pairs]
    twice = sorted({label for label in labels if labels.count(label) > 1})
    if twice:
        raise CellError(f"{matrix.path}: two variants have the same label {', '.join(twice)}; rename or remove one")
    return Plan(
        matrix=matrix, engine=subject.adapter.name, model=subject.model, settings=planner.base, pairs=pairs,
        cases=planner.cases, stages=order_stages(planner.cases), corpora=planner.corpora,
        backgrounds=planner.backgrounds, chosen=frozenset(subject.overrides),
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class _Role:
    """What a case is to its pair: reference, floor or variant; `forced` is the case it is forced along."""

    name: Literal["reference", "floor", "varied"]
    ids: tuple[str, ...] | None = None  # the corpus' requests it runs on; None is all
    forced: str | None = None
    seed_offset: int = 0


class _Planner:
    """Gathers cases and corpora while the pairs are laid out."""

    def __init__(self, matrix: Matrix, subject: Subject, cores: int) -> None:
        self.matrix = matrix
        self.subject = subject
        self.cores = cores
        self.base = resolve(subject.adapter, [("--set", subject.overrides)])
        self.cases: dict[str, Case] = {}
        self.corpora: dict[tuple[str, str], Corpus] = {}
        self.facts: dict[str, ModelFacts] = {}
        self.backgrounds: dict[str, Background] = {}

    def pair(self, cell: Cell, value: Scalar) -> Pair:
        adapter = self.subject.adapter
        label = f"{cell.name}[{slug(cell.reference)}-{slug(value)}]"
        pair = Pair(cell=cell, variant=value, label=label, owned=(), control_owned=())
        unmet = unmet_requirement(cell.requires, adapter.name, self.cores, dict(self.base))
        if unmet:
            return replace(pair, unsupported=unmet, foreseen=True)
        refused = self._refusal(cell)
        if refused:
            return replace(pair, unsupported=refused, foreseen=cell.name in self.matrix.allow_unsupported)
        owned = self._owned(cell.axis)
        control_owned = owned + self._control_fields(cell)
        pair = replace(pair, owned=tuple(sorted(set(owned))), control_owned=tuple(sorted(set(control_owned))))
        if cell.axis.kind == "environment":
            return self._environment(pair)
        return self._control(self._arms(pair), value)

    def _refusal(self, cell: Cell) -> str | None:
        """The engine's own reason why it cannot run the cell."""
        adapter = self.subject.adapter
        support = adapter.axes().get(cell.axis.name)
        if support is None and cell.axis.kind == "environment":
            support = AxisSupport(fields=cell.axis.fields)
        if support is None:
            return f"engine {adapter.name!r} does not offer the axis {cell.axis.name!r}"
        if support.unsupported:
            return support.unsupported
        if RULES.index(cell.rule) > RULES.index(adapter.strongest_rule()):
            return (
                f"engine {adapter.name!r} can be judged under {adapter.strongest_rule()!r} at most, not {cell.rule!r}"
            )
        if isinstance(adapter, RefusesByConfiguration):
            return adapter.refuses(cell.axis.name, cell.replay, dict(resolve(adapter, self._layers(cell, None))))
        return None

    def _owned(self, axis: Axis) -> tuple[str, ...]:
        if axis.kind == "environment":
            return axis.fields
        fields = self.subject.adapter.axes()[axis.name].fields
        fields += SCHEDULE_FIELDS if axis.kind == "schedule" else ()
        return fields + (HISTORY_FIELDS if axis.kind == "history" else ())

    def _control_fields(self, cell: Cell) -> tuple[str, ...]:
        axes = self.subject.adapter.axes()
        fields: tuple[str, ...] = ()
        for key, _ in cell.control.variant:
            fields += ("work.sampling",) if key == SEED_OFFSET else (f"config.{key}", f"resolved.{key}")
            fields += axes[key].fields if key in axes else ()
        return fields + (("config.fault", "resolved.fault") if cell.control.fault else ())

    def _arms(self, pair: Pair) -> Pair:
        cell = pair.cell
        layers = self._layers(cell, None)
        reference = self._case(cell, cell.reference, layers, _Role(name="reference"))
        floor = self._case(cell, cell.reference, layers, _Role(name="floor"))
        varied = self._case(cell, pair.variant, layers, _Role(name="varied", forced=reference))
        return replace(pair, reference=reference, floor=floor, varied=varied)

    def _environment(self, pair: Pair) -> Pair:
        """The variant twice now, and the same in the control's mode; the reference is a baseline, and no case."""
        cell, control = pair.cell, pair.cell.control
        layers = self._layers(cell, None)
        varied = self._case(cell, pair.variant, layers, _Role(name="varied"))
        pair = replace(pair, varied=varied, floor=self._case(cell, pair.variant, layers, _Role(name="floor")))
        if control.kind in ("none", "planted"):
            return pair
        ids = self.cases[varied].requests[: control.requests]
        layers = [*self._layers(cell, control.mode), (f"cell {cell.name!r}: [control]", dict(control.variant))]
        floor = self._case(cell, pair.variant, layers, _Role(name="floor", ids=ids))
        moved = self._case(cell, pair.variant, layers, _Role(name="varied", ids=ids))
        return replace(pair, control_floor=floor, control_varied=moved)

    def _control(self, pair: Pair, value: Scalar) -> Pair:
        cell, control = pair.cell, pair.cell.control
        if control.kind in ("none", "planted"):
            return pair
        if pair.reference is None:
            return pair
        ids = self.cases[pair.reference].requests[: control.requests]
        layers = self._layers(cell, control.mode)
        reference = self._case(cell, cell.reference, layers, _Role(name="reference", ids=ids))
        floor = self._case(cell, cell.reference, layers, _Role(name="floor", ids=ids))
        extra = {key: item for key, item in control.variant if key != SEED_OFFSET}
        if control.fault:
            extra["fault"] = control.fault
        varied_layers = [*layers, (f"cell {cell.name!r}: [control]", extra)]
        offset = next((int(item) for key, item in control.variant if key == SEED_OFFSET), 0)
        role = _Role(name="varied", ids=ids, forced=reference, seed_offset=offset)
        varied = self._case(cell, value, varied_layers, role)
        return replace(pair, control_reference=reference, control_floor=floor, control_varied=varied)

    def _layers(self, cell: Cell, mode: str | None) -> list[tuple[str, Mapping[str, Scalar]]]:
        where = f"cell {cell.name!r}"
        layers: list[tuple[str, Mapping[str, Scalar]]] = [("--set", self.subject.overrides)]
        layers.append((f"{where}: [settings]", dict(cell.settings)))
        if mode is not None:
            layers.append((f"{where}: [control] mode", mode_settings(self.subject.adapter, mode, where)))
        return layers

    def _case(self, cell: Cell, value: Scalar, layers: Layers, role: _Role) -> str:
        model = cell.model or self.subject.model
        corpus = self._corpus(cell.corpus, model)
        axis = cell.axis
        requests = role.ids or tuple(request.id for request in corpus.requests)
        companions = self._companions(axis, value, model)
        named = axis.kind == "schedule" and axis.name not in ("companions", "load")
        schedule = str(value) if named else cell.schedule
        golden = role.forced if cell.replay == "golden" else None
        case = Case(
            lifetime=self._lifetime(cell, value, layers, role), corpus=cell.corpus, corpus_digest=corpus.digest,
            requests=requests, companions=companions,
            schedule=build_schedule(
                schedule, requests, self._companion_ids(companions, model), cancelled=str(value).endswith(CANCELLED),
                background=self._background_arrivals(companions),
            ),
            prelude=self._prelude(axis, value, take(corpus, requests), model),
            replay="golden" if golden else "natural", golden=golden, repetition=1 if role.name == "floor" else 0,
            seed_offset=role.seed_offset, logits_digests=cell.rule == "tensors",
        )  # fmt: skip
        self.cases.setdefault(case.id, case)
        return case.id

    def _lifetime(self, cell: Cell, value: Scalar, layers: Layers, role: _Role) -> Lifetime:
        axis = cell.axis
        if axis.kind == "setting":
            layers = [*layers, (f"cell {cell.name!r}: [axis]", {axis.name: value})]
        before = f"nothing before {cell.corpus} {cell.schedule}" if value in NO_HISTORY else f"{axis.name} {value}"
        purpose = f"{before} {role.name} {len(role.ids or ())}" if axis.floor == "fresh lifetimes" else ""
        if purpose and self.subject.adapter.axes()[axis.name].resets:
            purpose = RESET + axis.name
        return Lifetime(
            engine=self.subject.adapter.name,
            model=cell.model or self.subject.model,
            settings=resolve(self.subject.adapter, layers),
            ordinal=1 if axis.kind == "process" and role.name == "varied" else 0,
            purpose=purpose,
        )

    def _prelude(self, axis: Axis, value: Scalar, corpus: Corpus, model: str) -> tuple[str, str] | None:
        """(kind, digest of the prelude's requests) of a history axis; None when nothing is served before."""
        if axis.kind != "history" or value in NO_HISTORY:
            return None
        source = companion_source(str(value))
        other = take(self._corpus(source[0], model), source[1]).requests if source else ()
        return str(value), digest(build_prelude(str(value), corpus.requests, other))

    def _corpus(self, name: str, model: str) -> Corpus:
        key = (model, name)
        if key not in self.corpora:
            adapter = self.subject.adapter
            if model not in self.facts:
                self.facts[model] = adapter.model_facts(model)
            facts = self.facts[model]
            corpus = retokenise(load_corpus(name), adapter.tokenizer(model))
            check_fits(corpus, facts.vocab_size, facts.max_position_embeddings)
            self.corpora[key] = corpus
        return self.corpora[key]

    def _companions(self, axis: Axis, value: Scalar, model: str) -> tuple[str, str, int] | None:
        if axis.name == "load" and value != NO_LOAD:
            return self._background(str(value), model)
        source = companion_source(str(value)) if axis.name == "companions" else None
        if source is None:
            return None
        name, count = source
        corpus = self._corpus(name, model)
        if count > len(corpus.requests):
            raise UsageError(f"companions {value!r}: corpus {name!r} has {len(corpus.requests)} requests, not {count}")
        return name, corpus.digest, count

    def _background(self, value: str, model: str) -> tuple[str, str, int]:
        """The background traffic as a corpus of its own, under its name; one that was written down has the same."""
        source = self._corpus(BACKGROUND_SOURCE, model)
        is_file = value.startswith(FROM_FILE)
        made = read_background(Path(value.removeprefix(FROM_FILE))) if is_file else None
        background = made or build_background(value, source.requests)
        if self.backgrounds.setdefault(background.name, background) != background:
            raise UsageError(f"load {value!r}: another background of the name {background.name!r} is in this plan")
        corpus = with_requests(source, background.requests, name=background.name)
        check_fits(corpus, self.facts[model].vocab_size, self.facts[model].max_position_embeddings)
        self.corpora[model, background.name] = corpus
        return background.name, corpus.digest, len(corpus.requests)

    def _background_arrivals(self, companions: tuple[str, str, int] | None) -> tuple[Arrival, ...]:
        if companions is None or companions[0] not in self.backgrounds:
            return ()
        name = companions[0]
        return tuple(
            replace(
                one, request=companion_id(name, one.request), after=companion_id(name, one.after) if one.after else None
            )
            for one in self.backgrounds[name].arrivals
        )

    def _companion_ids(self, companions: tuple[str, str, int] | None, model: str) -> tuple[str, ...]:
        """Companions that arrive as the schedule says; those of a background bring their arrivals."""
        if companions is None or companions[0] in self.backgrounds:
            return ()
        name, _, count = companions
        requests = take(self._corpus(name, model), count).requests
        return tuple(companion_id(name, request.id) for request in requests)


def companion_id(corpus: str, request: str) -> str:
    """A companion's id: it must not collide with a judged request's."""
    return f"companion:{corpus}:{request}"


def slug(value: Scalar) -> str:
    """A value as part of a label that needs no shell quoting."""
    text = str(value).lower() if isinstance(value, bool) else str(value)
    return "".join(char if char.isalnum() or char in "._-+" else "." for char in text)
