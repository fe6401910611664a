"""Child processes started from Python: `subprocess.run([...], env=...)`, `os.system(...)`."""

from __future__ import annotations

import ast
import shlex
from dataclasses import dataclass, replace

from harness.doctor.command import Outcome, read_command
from harness.doctor.facts import EnvSet, Install, Reach, Start
from harness.doctor.finding import Place
from harness.doctor.readers.python_names import Names

_RUNNERS = frozenset(
    {
        "subprocess.run",
        "subprocess.Popen",
        "subprocess.call",
        "subprocess.check_call",
        "subprocess.check_output",
        "os.system",
        "asyncio.create_subprocess_exec",
        "asyncio.create_subprocess_shell",
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """Starts and installs of one child, and the name of the environment it is given ("" when inherited)."""

    starts: tuple[Start, ...]
    installs: tuple[Install, ...]
    environment_name: str


def read_process(names: Names, name: str, node: ast.Call, place: Place) -> Process | None:
    """What the call starts; None when it starts no engine, script or install."""
    if name not in _RUNNERS or not node.args:
        return None
    words = _command_words(names, node)
    if not words:
        return None
    environment = next((keyword.value for keyword in node.keywords if keyword.arg == "env"), None)
    given, reach, is_open = _read_environment(names, environment, place)
    outcome: Outcome = read_command(words, place, {setting.name: setting for setting in given})
    owner = environment.id if isinstance(environment, ast.Name) else ""
    starts = tuple(replace(start, reach=start.reach or reach, open=start.open or is_open) for start in outcome.starts)
    return Process(starts=starts, installs=outcome.installs, environment_name=owner)


def _command_words(names: Names, node: ast.Call) -> list[str]:
    if isinstance(node.args[0], ast.Constant) or len(node.args) == 1:
        words = names.words(_joined(node.args[0]))
        if words is not None:
            return words
        text = names.text(node.args[0])
        try:
            return shlex.split(text) if text and len(text) < 20_000 else []
        except ValueError:
            return []
    return []


def _joined(node: ast.expr) -> ast.expr:
    """The list inside `" ".join(words)`; anything else is itself."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "join" and node.args:
        return node.args[0]
    return node


def _read_environment(names: Names, node: ast.expr | None, place: Place) -> tuple[list[EnvSet], Reach, str]:
    """Settings that `env=` adds, whether it replaces the parent's environment, and why it cannot be known."""
    found = names.literal(node)
    if found is None:
        return [], "", ""
    if isinstance(found, ast.BinOp) and isinstance(found.op, ast.BitOr):
        given, _, is_open = _read_environment(names, found.right, place)
        return given, "" if "os.environ" in ast.unparse(found.left) else "replaced", is_open
    if isinstance(found, ast.Call):
        if "os.environ" not in ast.unparse(found)[:500]:
            return [], "", "the child's environment is computed"
        given = [
            EnvSet(name=keyword.arg, value=names.text(keyword.value), place=place)
            for keyword in found.keywords
            if keyword.arg
        ]
        return given, "", ""
    if names.dotted(found) == "os.environ":
        return [], "", ""
    if not isinstance(found, ast.Dict):
        return [], "", "the child's environment is computed"
    return _read_table(names, found, place)


def _read_table(names: Names, table: ast.Dict, place: Place) -> tuple[list[EnvSet], Reach, str]:
    given: list[EnvSet] = []
    inherits = False
    is_open = ""
    for key, value in zip(table.keys, table.values, strict=True):
        if key is None:
            inherits = inherits or "os.environ" in ast.unparse(value)
            is_open = is_open or ("" if inherits else "the child's environment is computed")
            continue
        name = names.text(key)
        if name is not None:
            given.append(EnvSet(name=name, value=names.text(value), place=Place(place.path, value.lineno)))
    return given, "" if inherits or is_open else "replaced", is_open
