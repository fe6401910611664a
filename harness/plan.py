"""The plan: which cases run in which lifetimes, and which of them each pair compares. Data, made before anything runs.

It touches no engine. Rules: every (cell, variant) becomes a pair, judged or refused by name; cases are shared by
content; a case runs after the case it is forced along; what cannot run is planned as unsupported, never left out.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from harness.axis import Axis
from harness.canonical import digest
from harness.case import Case, Lifetime
from harness.cell import Cell, Requires
from harness.corpus import Corpus, check_fits, load_corpus, retokenise, take
from harness.engine import RULES, Adapter, ModelFacts, Scalar
from harness.errors import CellError, UsageError
from harness.matrix import Matrix
from harness.schedules import build_schedule, companion_source
from harness.settings import Settings, mode_settings, resolve

SEED_OFFSET = "seed_offset"  # the one control key that is no engine setting: added to every seed of the variant arm
SCHEDULE_FIELDS = ("work.schedule", "work.companions")


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
class Stage:
    """One engine process and the cases it runs, in order."""

    lifetime: Lifetime
    cases: tuple[str, ...]


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
    )  # fmt: skip


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

    def pair(self, cell: Cell, value: Scalar) -> Pair:
        adapter = self.subject.adapter
        label = f"{cell.name}[{slug(cell.reference)}-{slug(value)}]"
        pair = Pair(cell=cell, variant=value, label=label, owned=(), control_owned=())
        unmet = unmet_requirement(cell.requires, adapter.name, self.cores)
        if unmet:
            return replace(pair, unsupported=unmet, foreseen=True)
        refused = self._refusal(cell)
        if refused:
            return replace(pair, unsupported=refused, foreseen=cell.name in self.matrix.allow_unsupported)
        owned = self._owned(cell.axis)
        control_owned = owned + self._control_fields(cell)
        pair = replace(pair, owned=tuple(sorted(set(owned))), control_owned=tuple(sorted(set(control_owned))))
        return self._control(self._arms(pair), value)

    def _refusal(self, cell: Cell) -> str | None:
        """The engine's own reason why it cannot run the cell."""
        adapter = self.subject.adapter
        support = adapter.axes().get(cell.axis.name)
        if support is None:
            return f"engine {adapter.name!r} does not offer the axis {cell.axis.name!r}"
        if support.unsupported:
            return support.unsupported
        if RULES.index(cell.rule) > RULES.index(adapter.strongest_rule()):
            return (
                f"engine {adapter.name!r} can be judged under {adapter.strongest_rule()!r} at most, not {cell.rule!r}"
            )
        return None

    def _owned(self, axis: Axis) -> tuple[str, ...]:
        fields = self.subject.adapter.axes()[axis.name].fields
        return fields + (SCHEDULE_FIELDS if axis.kind == "schedule" else ())

    def _control_fields(self, cell: Cell) -> tuple[str, ...]:
        axes = self.subject.adapter.axes()
        fields: tuple[str, ...] = ()
        for key, _ in cell.control.variant:
            fields += ("work.sampling",) if key == SEED_OFFSET else (f"config.{key}",)
            fields += axes[key].fields if key in axes else ()
        return fields + (("config.fault",) if cell.control.fault else ())

    def _arms(self, pair: Pair) -> Pair:
        cell = pair.cell
        layers = self._layers(cell, None)
        reference = self._case(cell, cell.reference, layers, repetition=0, ids=None)
        floor = self._case(cell, cell.reference, layers, repetition=1, ids=None)
        varied = self._case(cell, pair.variant, layers, repetition=0, ids=None, forced=reference, variant=True)
        return replace(pair, reference=reference, floor=floor, varied=varied)

    def _control(self, pair: Pair, value: Scalar) -> Pair:
        cell, control = pair.cell, pair.cell.control
        if control.kind in ("none", "planted"):
            return pair
        if pair.reference is None:
            return pair
        ids = self.cases[pair.reference].requests[: control.requests]
        layers = self._layers(cell, control.mode)
        reference = self._case(cell, cell.reference, layers, repetition=0, ids=ids)
        floor = self._case(cell, cell.reference, layers, repetition=1, ids=ids)
        extra = {key: item for key, item in control.variant if key != SEED_OFFSET}
        if control.fault:
            extra["fault"] = control.fault
        varied_layers = [*layers, (f"cell {cell.name!r}: [control]", extra)]
        offset = next((int(item) for key, item in control.variant if key == SEED_OFFSET), 0)
        varied = self._case(
            cell,
            value,
            varied_layers,
            repetition=0,
            ids=ids,
            forced=reference,
            variant=True,
            seed_offset=offset,
        )
        return replace(pair, control_reference=reference, control_floor=floor, control_varied=varied)

    def _layers(self, cell: Cell, mode: str | None) -> list[tuple[str, Mapping[str, Scalar]]]:
        where = f"cell {cell.name!r}"
        layers: list[tuple[str, Mapping[str, Scalar]]] = [("--set", self.subject.overrides)]
        layers.append((f"{where}: [settings]", dict(cell.settings)))
        if mode is not None:
            layers.append((f"{where}: [control] mode", mode_settings(self.subject.adapter, mode, where)))
        return layers

    def _case(
        self,
        cell: Cell,
        value: Scalar,
        layers: Sequence[tuple[str, Mapping[str, Scalar]]],
        *,
        repetition: int,
        ids: tuple[str, ...] | None,
        forced: str | None = None,
        variant: bool = False,
        seed_offset: int = 0,
    ) -> str:
        model = cell.model or self.subject.model
        corpus = self._corpus(cell.corpus, model)
        axis = cell.axis
        if axis.kind == "setting":
            layers = [*layers, (f"cell {cell.name!r}: [axis]", {axis.name: value})]
        lifetime = Lifetime(
            engine=self.subject.adapter.name, model=model, settings=resolve(self.subject.adapter, layers),
            ordinal=1 if axis.kind == "process" and variant else 0,
        )  # fmt: skip
        requests = ids or tuple(request.id for request in corpus.requests)
        companions = self._companions(axis, value, model)
        schedule = str(value) if axis.kind == "schedule" and axis.name != "companions" else cell.schedule
        golden = cell.replay == "golden" and forced is not None
        case = Case(
            lifetime=lifetime, corpus=cell.corpus, corpus_digest=corpus.digest, requests=requests,
            companions=companions, schedule=build_schedule(schedule, requests, self._companion_ids(companions, model)),
            replay="golden" if golden else "natural", golden=forced if golden else None, repetition=repetition,
            seed_offset=seed_offset, logits_digests=cell.rule == "tensors",
        )  # fmt: skip
        self.cases.setdefault(case.id, case)
        return case.id

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
        source = companion_source(str(value)) if axis.name == "companions" else None
        if source is None:
            return None
        name, count = source
        corpus = self._corpus(name, model)
        if count > len(corpus.requests):
            raise UsageError(f"companions {value!r}: corpus {name!r} has {len(corpus.requests)} requests, not {count}")
        return name, corpus.digest, count

    def _companion_ids(self, companions: tuple[str, str, int] | None, model: str) -> tuple[str, ...]:
        if companions is None:
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
    return "".join(char if char.isalnum() or char in "._-" else "." for char in text)


def unmet_requirement(requires: Requires, engine: str, cores: int) -> str | None:
    """Why the cell cannot run here, or None."""
    if requires.engines and engine not in requires.engines:
        return f"the cell is for {', '.join(requires.engines)}, the engine is {engine}"
    for package in requires.packages:
        if importlib.util.find_spec(package) is None:
            return f"package {package!r} is not installed"
    for program in requires.programs:
        if shutil.which(program) is None:
            return f"program {program!r} is not on the PATH"
    if requires.cores > cores:
        return f"{requires.cores} cores are needed, {cores} are usable"
    if requires.accelerators:
        return f"{requires.accelerators} accelerator(s) needed; this engine and host show none"
    return _missing_flags(requires.cpu_flags)


def _missing_flags(flags: Sequence[str]) -> str | None:
    if not flags:
        return None
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:  # noqa: PTH123 - one line of a proc file
            present = next((set(line.split()) for line in file if line.startswith(("flags", "Features"))), set())
    except OSError as error:
        return f"CPU flags {', '.join(flags)} cannot be checked: {error.strerror}"
    missing = [flag for flag in flags if flag not in present]
    return f"this CPU lacks {', '.join(missing)}" if missing else None


def order_stages(cases: Mapping[str, Case]) -> tuple[Stage, ...]:
    """Groups cases by lifetime so that a case follows the one it is forced along.

    Each lifetime is one stage unless two lifetimes wait for each other; then one of them runs what it can and its
    forced cases follow in a second process of the same configuration (natural cases, and so floors, stay together).
    """
    waiting: dict[str, list[str]] = {}
    lifetimes: dict[str, Lifetime] = {}
    for case_id, case in cases.items():
        lifetimes[case.lifetime.id] = case.lifetime
        waiting.setdefault(case.lifetime.id, []).append(case_id)
    done: set[str] = set()
    stages: list[Stage] = []
    while waiting:
        ready = {key: _runnable(ids, cases, done) for key, ids in waiting.items()}
        whole = [key for key, ids in waiting.items() if len(ready[key]) == len(ids)]
        chosen = whole[0] if whole else max(ready, key=lambda key: len(ready[key]))
        run = ready[chosen]
        if not run:
            missing = sorted(cases[case].golden or "" for ids in waiting.values() for case in ids)
            raise UsageError(f"the plan is forced along cases it does not hold: {', '.join(missing)}")
        stages.append(Stage(lifetime=lifetimes[chosen], cases=tuple(run)))
        done.update(run)
        rest = [case for case in waiting[chosen] if case not in done]
        if rest:
            waiting[chosen] = rest
        else:
            del waiting[chosen]
    return tuple(stages)


def _runnable(ids: Sequence[str], cases: Mapping[str, Case], done: set[str]) -> list[str]:
    natural = [case for case in ids if cases[case].golden is None]
    known = done | set(natural)
    return natural + [case for case in ids if cases[case].golden is not None and cases[case].golden in known]
