"""How Python sets environment variables: items, setdefault, update, tables, monkeypatch."""

from __future__ import annotations

import ast

from harness.doctor.facts import EnvSet
from harness.doctor.readers.python_reading import Reading


def text_of(node: ast.AST) -> str:
    return ast.unparse(node)[:300]


def set_from_items(reading: Reading, node: ast.For | ast.AsyncFor) -> bool:
    """`for key, value in {...}.items(): os.environ[key] = value`."""
    call = node.iter
    if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr == "items"):
        return False
    table = reading.names.literal(call.func.value)
    target = node.target
    if not (isinstance(table, ast.Dict) and isinstance(target, ast.Tuple) and len(target.elts) == 2):
        return False
    text = text_of(ast.Module(body=node.body, type_ignores=[]))
    key, value = text_of(target.elts[0]), text_of(target.elts[1])
    plain, default = f"os.environ[{key}] = {value}", f"os.environ.setdefault({key}, {value})"
    if plain not in text and default not in text:
        return False
    how = "setdefault" if default in text and plain not in text else ""
    set_table(reading, table, node, how)
    return True


def set_item(reading: Reading, target: ast.Subscript, value: ast.expr, node: ast.AST) -> None:
    owner = reading.names.dotted(target.value)
    key = reading.names.text(target.slice)
    if owner == "os.environ":
        if key is None:
            reading.open = reading.open or f"a computed name is set at line {reading.place(node).line}"
            return
        set_variable(reading, key, value, node, "")
    elif key is not None and isinstance(target.value, ast.Name):
        setting = _setting(reading, key, value, node, "")
        reading.children.setdefault(target.value.id, []).append(setting)


def _setting(reading: Reading, name: str, value: ast.expr | None, node: ast.AST, how: str) -> EnvSet:
    text, fallback = (None, "") if value is None else _env_value(reading, name, value)
    asked = any(f"'{name}'" in test for test in reading.missing)
    return EnvSet(
        name=name,
        value=text,
        place=reading.place(node),
        unset=value is None,
        overridable=how or fallback or ("set only when it is not set already" if asked else ""),
        guard=reading.guard,
        scope=reading.function,
        branch=reading.branch,
    )


def set_variable(reading: Reading, name: str, value: ast.expr | None, node: ast.AST, how: str) -> None:
    setting = _setting(reading, name, value, node, how)
    reading.settings.append(setting)
    if reading.remote:
        reading.inner.add(setting)


def _env_value(reading: Reading, name: str, value: ast.expr) -> tuple[str | None, str]:
    """The value and how something else can win: `os.environ.get(NAME, x)`, `os.getenv(NAME) or x`."""
    if isinstance(value, ast.BoolOp) and isinstance(value.op, ast.Or) and _reads_env(reading, value.values[0], name):
        return reading.names.text(value.values[-1]), "os.environ.get(...) or"
    if _reads_env(reading, value, name):
        assert isinstance(value, ast.Call)  # noqa: S101
        default = value.args[1] if len(value.args) > 1 else None
        return (reading.names.text(default) if default is not None else None), "os.environ.get(..., default)"
    return reading.names.text(value), ""


def _reads_env(reading: Reading, node: ast.expr, name: str) -> bool:
    return (
        isinstance(node, ast.Call)
        and reading.names.dotted(node.func) in ("os.environ.get", "os.getenv")
        and bool(node.args)
        and reading.names.text(node.args[0]) == name
    )


def set_table(reading: Reading, table: ast.Dict, node: ast.AST, how: str) -> None:
    for key, value in zip(table.keys, table.values, strict=True):
        name = reading.names.text(key) if key is not None else None
        if name is None:
            reading.open = reading.open or f"a computed table is set at line {reading.place(node).line}"
            continue
        line = value if len(table.keys) > 1 else node
        set_variable(reading, name, value, line, how)


def read_environment_call(reading: Reading, name: str, node: ast.Call) -> None:
    arguments = node.args
    if name in ("os.environ.setdefault", "os.putenv", "os.environ.pop", "os.unsetenv") and arguments:
        key = reading.names.text(arguments[0])
        if key is None:
            reading.open = reading.open or f"a computed name is set at line {node.lineno}"
        elif name in ("os.environ.pop", "os.unsetenv"):
            set_variable(reading, key, None, node, "")
        elif len(arguments) > 1:
            set_variable(reading, key, arguments[1], node, "setdefault" if name.endswith("setdefault") else "")
    elif name == "os.environ.update":
        _read_update(reading, node)
    elif isinstance(node.func, ast.Attribute) and node.func.attr in ("setenv", "delenv") and arguments:
        key = reading.names.text(arguments[0])
        if key is not None:  # pytest's monkeypatch: undone after the test, so never called late
            value = arguments[1] if node.func.attr == "setenv" and len(arguments) > 1 else None
            set_variable(reading, key, value, node, "")
            reading.patched.add(reading.place(node))
    elif name.endswith("patch.dict") and len(arguments) > 1 and "environ" in text_of(arguments[0]):
        table = reading.names.literal(arguments[1])
        if isinstance(table, ast.Dict):
            first = len(reading.settings)
            set_table(reading, table, node, "")
            reading.patched.update(item.place for item in reading.settings[first:])
    elif name.endswith("load_dotenv") and arguments:
        reading.words.add("load_dotenv(path)")


def _read_update(reading: Reading, node: ast.Call) -> None:
    for argument in node.args:
        table = reading.names.literal(argument)
        if isinstance(table, ast.Dict):
            set_table(reading, table, node, "")
        else:
            reading.open = reading.open or f"os.environ is updated from something computed at line {node.lineno}"
    for keyword in node.keywords:
        if keyword.arg:
            set_variable(reading, keyword.arg, keyword.value, keyword.value, "")
