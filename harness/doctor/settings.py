"""The doctor's own settings: a severity per rule, from `[tool.samebits.doctor]` or samebits.toml's `[doctor]`.

It knows rule names and nothing of findings. The nearest file at or above the first path counts; every mistake in it is
reported at once.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from harness.doctor.finding import Rule, Severity
from harness.doctor.near_miss import edit_distance
from harness.errors import UsageError

_LEVELS = tuple(level.value for level in Severity)
_HIGHEST = 40  # folders to climb


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorSettings:
    """Severities that differ from the rules' own, and where they were read ("" for nowhere)."""

    severities: Mapping[str, Severity] = field(default_factory=dict)
    source: str = ""

    def severity(self, rule: Rule) -> Severity:
        """How loud `rule` is."""
        return self.severities.get(rule.id, rule.severity)


def suggest(word: str, known: tuple[str, ...]) -> str:
    """ "; did you mean NAME?" for the nearest known name, or nothing."""
    ranked = sorted((edit_distance(word, name, 6), name) for name in known)
    return f"; did you mean `{ranked[0][1]}`?" if ranked and ranked[0][0] <= max(2, len(word) // 3) else ""


def find_settings(start: Path, rules: tuple[Rule, ...]) -> DoctorSettings:
    """The settings that hold for `start`: the nearest file at or above it that has the table.

    Raises UsageError naming every mistake of that file.
    """
    folder = start if start.is_dir() else start.parent
    for candidate in [folder.resolve(), *folder.resolve().parents][:_HIGHEST]:
        for name in ("samebits.toml", "pyproject.toml"):
            file = candidate / name
            if file.is_file():
                found = _read(file, rules)
                if found is not None:
                    return found
    return DoctorSettings()


def load_settings(file: Path, rules: tuple[Rule, ...]) -> DoctorSettings:
    """The settings in one named file. Raises UsageError when it has none or they do not validate."""
    found = _read(file, rules)
    if found is None:
        raise UsageError(f"{file}: no [doctor] or [tool.samebits.doctor] table; add one or drop --config")
    return found


def _read(file: Path, rules: tuple[Rule, ...]) -> DoctorSettings | None:
    try:
        table = tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        raise UsageError(f"{file}: cannot be read as TOML ({error}); repair it or pass --config") from error
    if file.name == "pyproject.toml":
        if _looks_ours(table.get("doctor"), rules):
            raise UsageError(f"{file}: [doctor] belongs under [tool.samebits.doctor] in pyproject.toml; rename it")
        section, path = _dig(table, "tool", "samebits", "doctor"), "tool.samebits.doctor"
    else:
        section, path = table.get("doctor"), "doctor"
    if section is None:
        return None
    return _validate(file, path, section, rules)


def _dig(table: object, *keys: str) -> object:
    for key in keys:
        if not isinstance(table, dict):
            return None
        table = table.get(key)
    return table


def _looks_ours(section: object, rules: tuple[Rule, ...]) -> bool:
    return isinstance(section, dict) and any(rule.id in section for rule in rules)


def _validate(file: Path, path: str, section: object, rules: tuple[Rule, ...]) -> DoctorSettings:
    if not isinstance(section, dict):
        raise UsageError(f"{file}: $.{path}: expected a table of RULE = severity, got {type(section).__name__}")
    known = tuple(rule.id for rule in rules)
    severities: dict[str, Severity] = {}
    mistakes = []
    for name, value in section.items():
        if name not in known:
            mistakes.append(f"$.{path}.{name}: no such rule{suggest(name, known)}")
        elif not isinstance(value, str) or value not in _LEVELS:
            mistakes.append(f"$.{path}.{name}: expected one of {', '.join(_LEVELS)}, got {value!r}")
        else:
            severities[name] = Severity(value)
    if mistakes:
        raise UsageError(f"{file}: " + "; ".join(mistakes))
    return DoctorSettings(severities=severities, source=str(file))
