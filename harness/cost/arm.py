"""The arms of a comparison: an engine's settings, and what was asked for to get them.

It does not run anything. Rules: an arm is named by a mode or by settings, over the settings both arms share; the off
arm runs as two arms, so that the distance between identical ones is known; what is only shown never enters a ratio
that is called a cost.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from harness.engine import Adapter, Field, Scalar
from harness.errors import UsageError
from harness.settings import Settings, mode_settings, parse_assignments, resolve

ON: Final = "on"
OFF: Final = "off"
OFF_AGAIN: Final = "off again"
COMPARED: Final = (OFF, ON, OFF_AGAIN)
SHOWN_MODE: Final = "native"  # shown beside where the engine has it: it changes more than the order of sums


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One side of a comparison. `slowed` above 1 is a planted slowdown."""

    name: str
    label: str  # what was asked for, in words
    asked: Mapping[str, Scalar]
    settings: Settings
    slowed: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Arms:
    """What is compared, and what is shown beside it."""

    on: Arm
    off: Arm
    shown: tuple[Arm, ...]

    @property
    def same(self) -> bool:
        """Whether both arms are one configuration (A/A)."""
        return self.on.settings == self.off.settings and self.on.slowed == self.off.slowed

    def turns(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Names of the arms that are compared, in order, and of those that are shown."""
        return COMPARED, tuple(arm.name for arm in self.shown)

    def of(self, name: str) -> Arm:
        """The arm that runs under a name of `turns`."""
        return {ON: self.on, OFF: self.off, OFF_AGAIN: self.off, **{arm.name: arm for arm in self.shown}}[name]

    def kinds(self) -> tuple[Arm, ...]:
        """Each configuration once."""
        return (self.on, self.off, *self.shown)


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """A field in which the arms differ beyond what was asked for. `owned`: the engine says it moves with that."""

    name: str
    on: Scalar | None
    off: Scalar | None
    owned: bool


def choose_arms(
    adapter: Adapter, on: Sequence[str], off: Sequence[str], shown: Sequence[str] | None, shared: Mapping[str, Scalar],
    slowed: float = 1.0,
) -> Arms:  # fmt: skip
    """The arms that the command line names; by default the modes deterministic and ordinary.

    Raises:
        UsageError: an unknown mode, setting or value; no such default modes; a slowdown below 1.
    """
    if slowed < 1:
        raise UsageError(f"--plant-slowdown {slowed:g}: expected a factor of at least 1")
    default = not on and not off
    if shown is None:
        shown = (SHOWN_MODE,) if default and SHOWN_MODE in adapter.modes() else ()
    return Arms(
        on=_arm(adapter, ON, on or ("deterministic",), shared, "--on", slowed),
        off=_arm(adapter, OFF, off or ("ordinary",), shared, "--off", 1.0),
        shown=tuple(_arm(adapter, name, (name,), shared, "--show", 1.0) for name in shown),
    )


def _arm(
    adapter: Adapter, name: str, texts: Sequence[str], shared: Mapping[str, Scalar], where: str, slowed: float
) -> Arm:
    asked: dict[str, Scalar] = {}
    for text in texts:
        if "=" in text:
            asked.update(_assigned(adapter, text, where))
        else:
            asked.update(mode_settings(adapter, text, where))
    return Arm(
        name=name,
        label=", ".join(f"{key}={_shown(value)}" for key, value in sorted(asked.items())) or texts[0],
        asked=asked,
        settings=resolve(adapter, [("--set", shared), (where, asked)]),
        slowed=slowed,
    )


def _assigned(adapter: Adapter, text: str, where: str) -> dict[str, Scalar]:
    try:
        return parse_assignments(adapter, [text])
    except UsageError as error:
        raise UsageError(str(error).replace("--set", where)) from error


def _shown(value: Scalar) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def configuration_differences(
    adapter: Adapter, arms: tuple[Arm, Arm], fields: tuple[Sequence[Field], Sequence[Field]]
) -> tuple[Difference, ...]:
    """Identity and observed fields in which the engines of (on, off) differ, without what was asked for."""
    asked = {key for arm in arms for key in arm.asked}
    moved = tuple(name for key in sorted(asked) for name in _axis_fields(adapter, key))
    on, off = (_comparable(side, asked) for side in fields)
    return tuple(
        Difference(name=name, on=on.get(name), off=off.get(name), owned=any(_covers(mask, name) for mask in moved))
        for name in sorted(on.keys() | off.keys())
        if on.get(name) != off.get(name) or type(on.get(name)) is not type(off.get(name))
    )


def _comparable(fields: Sequence[Field], asked: set[str]) -> dict[str, Scalar | None]:
    hidden = {f"{part}.{key}" for part in ("config", "resolved") for key in asked}
    return {
        field.name: field.value
        for field in fields
        if field.name not in hidden and (field.field_class == "identity" or field.name.startswith("observed."))
    }


def _axis_fields(adapter: Adapter, key: str) -> tuple[str, ...]:
    support = adapter.axes().get(key)
    return support.fields if support is not None else ()


def _covers(mask: str, name: str) -> bool:
    return name == mask or (mask.endswith(".*") and name.startswith(mask[:-1]))
