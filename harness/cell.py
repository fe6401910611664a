"""A cell: one row of the matrix, read from TOML as a sentence and checked to the last key.

It does not know engines, corpora's contents or files' places. Rules: unknown keys, wrong types and unknown names are
mistakes; all mistakes of a document are reported at once, each with its path.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, cast, get_args

from harness.axis import AXES, Axis
from harness.engine import RULES, Replay, Rule, Scalar
from harness.reader import Reader, shown
from harness.schedules import SCHEDULES, value_mistake

SCHEMA = 1
NAME = re.compile(r"[a-z0-9][a-z0-9.-]*")
ControlKind = Literal["mode", "variant", "fault", "planted", "none"]
Expect = Literal["FAIL", "ERROR", "RUN-TO-RUN"]  # RUN-TO-RUN: FAIL because the reference differs from itself
PLANTED = ("least",)  # the least difference that the rule must find


@dataclass(frozen=True, slots=True, kw_only=True)
class Control:
    """A run that must differ. `mode` holds for both arms, `variant` for the variant arm only (both may be given).

    `fault` names an engine fault switch; `planted` alters a stored capture and so tests the comparator only.
    `requests` is how many of the corpus' first requests the control runs on; None is all of them.
    """

    kind: ControlKind
    mode: str | None = None
    variant: tuple[tuple[str, Scalar], ...] = ()
    fault: str | None = None
    planted: str | None = None
    requests: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Requires:
    """What must be at hand for the cell to be run at all; unmet is UNSUPPORTED with the reason."""

    engines: tuple[str, ...] = ()
    devices: tuple[str, ...] = ()  # values of the engine's setting `device`; an engine without one fits any
    packages: tuple[str, ...] = ()
    programs: tuple[str, ...] = ()
    cpu_flags: tuple[str, ...] = ()
    accelerators: int = 0
    cores: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One declared invariant and how it is put to the test."""

    name: str
    invariant: str
    corpus: str
    rule: Rule
    replay: Replay
    axis: Axis
    reference: Scalar
    variants: tuple[Scalar, ...]
    control: Control
    requires: Requires
    schedule: str  # base schedule of the arms when the axis is no schedule
    settings: tuple[tuple[str, Scalar], ...]  # engine settings of both arms
    expect: Expect | None
    model: str | None
    minimum: int  # least witnessed positions, over the whole cell


def parse_cell(table: Mapping[str, object], path: str = "$") -> tuple[Cell | None, tuple[str, ...]]:
    """A cell, or None and every mistake with its path."""
    reader = Reader(table, path)
    name = reader.take("name", str)
    if name is not None and not NAME.fullmatch(name):
        reader.mistake("name", f"expected lower-case letters, digits, '-' and '.', got {name!r}")
    invariant = reader.take("invariant", str)
    if invariant is not None and not invariant.strip():
        reader.mistake("invariant", "expected a sentence, got an empty string")
    corpus = reader.take("corpus", str)
    rule = reader.choice("rule", RULES)
    replay = reader.choice("replay", get_args(Replay))
    schedule = reader.choice("schedule", SCHEDULES, "together")
    expect = reader.choice("expect", get_args(Expect), None)
    model = reader.take("model", str, None)
    minimum = reader.natural("minimum", 1, 1)
    axis, reference, variants = _read_axis(reader.child("axis", required=True))
    control = _read_control(reader.child("control"), given="control" in table)
    requires = _read_requires(reader.child("requires"))
    settings = _read_scalars(reader.child("settings"))
    if axis is not None and axis.kind == "environment":
        _check_environment(reader, axis, replay, control)
    reader.close()
    if reader.mistakes or axis is None:
        return None, tuple(reader.mistakes)
    cell = Cell(
        name=cast("str", name), invariant=cast("str", invariant), corpus=cast("str", corpus), rule=cast("Rule", rule),
        replay=cast("Replay", replay), axis=axis, reference=reference, variants=variants, control=control,
        requires=requires, schedule=cast("str", schedule), settings=settings,
        expect=cast("Expect | None", expect), model=model, minimum=minimum,
    )  # fmt: skip
    return cell, ()


def _read_axis(reader: Reader) -> tuple[Axis | None, Scalar, tuple[Scalar, ...]]:
    name = reader.choice("name", tuple(AXES))
    reference = _scalar(reader, "reference", reader.raw("reference"))
    values = reader.raw("variants")
    variants: list[Scalar] = []
    if not isinstance(values, list) or not values:
        reader.mistake("variants", f"expected a list with at least one value, got {shown(values)}")
    else:
        variants = [_scalar(reader, f"variants[{index}]", value) for index, value in enumerate(values)]
    reader.close()
    if name is None:
        return None, reference, tuple(variants)
    axis = AXES[name]
    places = [
        ("reference", reference),
        *((f"variants[{index}]", value) for index, value in enumerate(variants)),
    ]
    for place, value in places:
        message = value_mistake(axis.name, value) if axis.kind != "setting" else None
        if message:
            reader.mistake(place, message)
    for index, value in enumerate(variants):
        if value == reference and type(value) is type(reference):
            reader.mistake(f"variants[{index}]", f"{value!r} equals the reference; nothing would be varied")
        if value in variants[:index]:
            reader.mistake(f"variants[{index}]", f"{value!r} is listed twice")
    return axis, reference, tuple(variants)


def _check_environment(reader: Reader, axis: Axis, replay: str | None, control: Control) -> None:
    """What a cell whose reference is a baseline cannot ask for."""
    if replay == "golden":
        reason = f"the reference of axis {axis.name!r} is a baseline, which is natural"
        reader.mistake("replay", f"expected 'natural': {reason}")
    if control.kind not in ("mode", "variant", "none"):
        reader.mistake("control", f"axis {axis.name!r} takes a control by mode or variant, got {control.kind}")


def _scalar(reader: Reader, key: str, value: object) -> Scalar:
    if isinstance(value, str | int | float | bool):
        return value
    if isinstance(value, (list, dict)):
        reader.mistake(key, f"expected a string, number or boolean, got {shown(value)}")
    return ""


def _read_scalars(reader: Reader) -> tuple[tuple[str, Scalar], ...]:
    pairs = [(key, _scalar(reader, key, reader.raw(key))) for key in sorted(reader.table)]
    reader.close()
    return tuple(pairs)


def _read_control(reader: Reader, *, given: bool) -> Control:
    mode = reader.take("mode", str, None)
    variant = _read_scalars(reader.child("variant"))
    fault = reader.take("fault", str, None)
    planted = reader.choice("planted", PLANTED, None)
    requests = reader.take("requests", int, None)
    if requests is not None and requests < 1:
        reader.mistake("requests", f"expected an integer of at least 1, got {requests}")
    reader.close()
    kinds: list[ControlKind] = []
    if mode is not None or variant:
        kinds.append("mode" if mode is not None else "variant")
    kinds += ["fault"] if fault is not None else []
    kinds += ["planted"] if planted is not None else []
    if given and len(kinds) != 1:
        reader.mistake("", "expected one of mode (with or without variant), variant, fault or planted; "
                           f"got {', '.join(kinds) or 'none of them'}")  # fmt: skip
    kind = kinds[0] if len(kinds) == 1 else "none"
    return Control(kind=kind, mode=mode, variant=variant, fault=fault, planted=planted, requests=requests)


def _read_requires(reader: Reader) -> Requires:
    requires = Requires(
        engines=reader.strings("engines"), devices=reader.strings("devices"), packages=reader.strings("packages"),
        programs=reader.strings("programs"), cpu_flags=reader.strings("cpu_flags"),
        accelerators=reader.natural("accelerators", 0, 0), cores=reader.natural("cores", 1, 1),
    )  # fmt: skip
    reader.close()
    return requires
