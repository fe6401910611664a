"""Python scripts through `ast`: environment settings, engine starts, requests and the calls people believe in.

It knows names and calls, not values: a name bound once to a literal is that literal, everything else is unknown.
Nothing is imported or evaluated.
"""

from __future__ import annotations

import ast
import re
import sys
import warnings
from dataclasses import replace
from itertools import islice

from harness.doctor.accelerator import accelerator_test
from harness.doctor.facts import Call, Document, Problem, Start, overflow
from harness.doctor.readers.python_environment import (
    read_environment_call,
    set_from_items,
    set_item,
    set_table,
    set_variable,
    text_of,
)
from harness.doctor.readers.python_names import child_nodes, collect_names
from harness.doctor.readers.python_processes import read_process
from harness.doctor.readers.python_reach import mark_late, with_environment
from harness.doctor.readers.python_reading import Reading
from harness.doctor.readers.python_requests import read_request_call
from harness.doctor.readers.python_starts import read_start

_BELIEVED = frozenset(
    {
        "torch.manual_seed",
        "torch.cuda.manual_seed",
        "torch.cuda.manual_seed_all",
        "torch.use_deterministic_algorithms",
        "torch.set_deterministic",
        "transformers.set_seed",
        "lightning.seed_everything",
        "numpy.random.seed",
        "random.seed",
    }
)
# A file without any of these words holds no fact: it is parsed, and read no further.
_MATTERS = re.compile(
    r"environ|putenv|unsetenv|setenv|SamplingParams|\bLLM\b|EngineArgs|sglang|deepinfer|tensorrt_llm|openai|anthropic|"
    r"subprocess|os\.system|\.post\(|\.request\(|manual_seed|set_seed|deterministic|cudnn|seed_everything|dotenv"
)
MAX_ARM = 500  # nodes of an else arm that are looked at
_VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"
_SWITCHES = frozenset({"torch.backends.cudnn.deterministic", "torch.backends.cudnn.benchmark"})


def read_python(path: str, text: str) -> Document:
    """A Python file as facts; `problem` is set when it does not parse."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(text)
    except SyntaxError as error:
        return _broken(path, text, error.lineno or 1, f"{error.msg} (read with the grammar of Python {_VERSION})")
    except (ValueError, RecursionError, MemoryError, OverflowError) as error:
        return _broken(path, text, 1, f"it is nested too deeply or malformed ({type(error).__name__})")
    if not _MATTERS.search(text):
        return Document(path=path, kind="python", text=text)
    try:
        reading = Reading(path=path, names=collect_names(tree))
        _visit_body(reading, tree.body)
    except RecursionError:
        return _broken(path, text, 1, "it is nested too deeply")
    return _document(reading, text)


def _broken(path: str, text: str, line: int, words: str) -> Document:
    return Document(path=path, kind="python", problem=Problem(line=line, text=words), text=text)


def _document(reading: Reading, text: str) -> Document:
    problem = overflow(len(reading.starts), len(reading.settings))
    if problem is not None:
        return Document(path=reading.path, kind="python", problem=problem, text=text)
    settings = tuple(mark_late(reading, setting) for setting in reading.settings)
    starts = tuple(
        with_environment(reading, start, settings, remote=number in reading.remote_starts)
        for number, start in enumerate(reading.starts)
    )
    return Document(
        path=reading.path,
        kind="python",
        settings=settings,
        starts=starts,
        requests=tuple(reading.requests),
        calls=tuple(reading.calls),
        installs=tuple(reading.installs),
        imports=tuple(sorted({module for module, _, _ in reading.imports})),
        words=frozenset(reading.words),
        open=reading.open,
        text=text,
    )


def _visit_body(reading: Reading, body: list[ast.stmt]) -> None:
    kept = reading.guard
    for statement in body:
        _visit(reading, statement)
        if isinstance(statement, ast.If) and not statement.orelse and _leaves(statement.body):
            reading.guard = reading.guard or accelerator_test(text_of(statement.test))
    reading.guard = kept


def _leaves(body: list[ast.stmt]) -> bool:
    """Whether an arm quietly leaves the block (a raise is not quiet)."""
    return isinstance(body[-1], ast.Return | ast.Continue | ast.Break)


def _visit(reading: Reading, node: ast.AST) -> None:
    handler = _HANDLERS.get(type(node))
    if handler is not None:
        handler(reading, node)
        return
    for child in child_nodes(node):
        _visit(reading, child)


def _visit_import(reading: Reading, node: ast.AST) -> None:
    if isinstance(node, ast.ImportFrom):
        modules = [node.module or ""]
        modules += [f"{node.module}.{alias.name}" if node.module else alias.name for alias in node.names]
    else:
        assert isinstance(node, ast.Import)  # noqa: S101 - the handler table says so
        modules = [alias.name for alias in node.names]
    line = getattr(node, "lineno", 1)
    reading.imports.extend((module, line, reading.function) for module in modules if module)


def _visit_function(reading: Reading, node: ast.AST) -> None:
    assert isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)  # noqa: S101
    kept = (reading.functions, reading.branch, reading.guard, reading.remote, reading.loops)
    for decorator in node.decorator_list:
        _visit(reading, decorator)
        if "ray.remote" in text_of(decorator):
            reading.remote = True
    reading.functions = (*reading.functions, node.name)
    reading.guard, reading.loops = "", []
    _visit_body(reading, node.body)
    reading.functions, reading.branch, reading.guard, reading.remote, reading.loops = kept


def _visit_if(reading: Reading, node: ast.AST) -> None:
    assert isinstance(node, ast.If)  # noqa: S101
    _visit(reading, node.test)
    test = text_of(node.test)
    if test in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
        _visit_body(reading, node.orelse)
        return
    branch, guard, missing = reading.branch, reading.guard, reading.missing
    speaks = _speaks_up(node)
    at = f"if:{node.lineno}:{node.col_offset}"
    reading.branch = (*branch, f"{at}:then")
    reading.guard = guard or ("" if speaks else accelerator_test(test))
    if "not in os.environ" in test or "not os.environ.get" in test or "not os.getenv" in test or "is None" in test:
        reading.missing = (*missing, test)
    _visit_body(reading, node.body)
    reading.branch, reading.guard, reading.missing = (*branch, f"{at}:else"), guard, missing
    if not speaks and "not " in test:
        reading.guard = guard or accelerator_test(test)
    _visit_body(reading, node.orelse)
    reading.branch, reading.guard = branch, guard


def _speaks_up(node: ast.If) -> bool:
    """The other arm raises, exits, or sets something too: then the test is no silent skip."""
    nodes = (inner for statement in node.orelse for inner in ast.walk(statement))
    for inner in islice(nodes, MAX_ARM):
        if isinstance(inner, ast.Raise | ast.Assert):
            return True
        if isinstance(inner, ast.Attribute | ast.Name):
            name = inner.attr if isinstance(inner, ast.Attribute) else inner.id
            if name in ("environ", "exit", "abort", "SystemExit", "skip"):
                return True
    return False


def _visit_loop(reading: Reading, node: ast.AST) -> None:
    if isinstance(node, ast.For | ast.AsyncFor):
        _visit(reading, node.iter)
        if set_from_items(reading, node):
            return
        reading.loops.append(node.iter)
    elif isinstance(node, ast.While):
        _visit(reading, node.test)
        reading.loops.append(node.test)
    assert isinstance(node, ast.For | ast.AsyncFor | ast.While)  # noqa: S101
    _visit_body(reading, node.body)
    reading.loops.pop()
    _visit_body(reading, node.orelse)


def _visit_comprehension(reading: Reading, node: ast.AST) -> None:
    generators = getattr(node, "generators", [])
    for generator in generators:
        _visit(reading, generator.iter)
        reading.loops.append(generator.iter)
    for name in ("elt", "key", "value"):
        inner = getattr(node, name, None)
        if inner is not None:
            _visit(reading, inner)
    for _ in generators:
        reading.loops.pop()


def _visit_with(reading: Reading, node: ast.AST) -> None:
    assert isinstance(node, ast.With | ast.AsyncWith | ast.Try)  # noqa: S101
    if isinstance(node, ast.Try):
        blocks = [node.body, *[handler.body for handler in node.handlers], node.orelse, node.finalbody]
        for block in blocks:
            _visit_body(reading, block)
        return
    for item in node.items:
        _visit(reading, item.context_expr)
    _visit_body(reading, node.body)


def _visit_assign(reading: Reading, node: ast.AST) -> None:
    assert isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign)  # noqa: S101
    value = node.value
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    for target in targets:
        if value is not None and isinstance(target, ast.Subscript):
            set_item(reading, target, value, node)
        name = reading.names.dotted(target)
        if name in _SWITCHES and value is not None:
            _switch(reading, name, value, node)
        if isinstance(node, ast.AugAssign) and name == "os.environ" and value is not None:
            table = reading.names.literal(value)
            if isinstance(table, ast.Dict):
                set_table(reading, table, node, "")
    if value is not None:
        _visit(reading, value)


def _switch(reading: Reading, name: str, value: ast.expr, node: ast.AST) -> None:
    wanted = "False" if name.endswith("benchmark") else "True"
    if text_of(value) == wanted:
        reading.calls.append(Call(name=f"{name} = {wanted}", place=reading.place(node)))


def _visit_delete(reading: Reading, node: ast.AST) -> None:
    assert isinstance(node, ast.Delete)  # noqa: S101
    for target in node.targets:
        if isinstance(target, ast.Subscript) and reading.names.dotted(target.value) == "os.environ":
            name = reading.names.text(target.slice)
            if name:
                set_variable(reading, name, None, node, "")


def _visit_call(reading: Reading, node: ast.AST) -> None:
    assert isinstance(node, ast.Call)  # noqa: S101
    name = reading.names.dotted(node.func)
    if not reading.functions and isinstance(node.func, ast.Name):
        reading.called.setdefault(node.func.id, node.lineno)
    read_environment_call(reading, name, node)
    if name in _BELIEVED and not (name.endswith("algorithms") and node.args and text_of(node.args[0]) == "False"):
        reading.calls.append(Call(name=name, place=reading.place(node)))
    if name == "ray.init":
        reading.ray = node
    start = read_start(reading.names, name, node, reading.place(node))
    if start is not None:
        _add_start(reading, start)
    reading.requests.extend(read_request_call(reading.names, name, node, reading.path, reading.loops))
    process = read_process(reading.names, name, node, reading.place(node))
    if process is not None:
        reading.installs.extend(process.installs)
        for child in process.starts:
            _add_start(reading, replace(child, scope=process.environment_name or "inherit"))
    for inner in child_nodes(node):
        _visit(reading, inner)


def _add_start(reading: Reading, start: Start) -> None:
    if reading.remote:
        reading.remote_starts.add(len(reading.starts))
    reading.starts.append(start)


def _visit_attribute(reading: Reading, node: ast.AST) -> None:
    assert isinstance(node, ast.Attribute)  # noqa: S101
    reading.words.add(node.attr)
    _visit(reading, node.value)


def _visit_constant(reading: Reading, node: ast.AST) -> None:
    value = getattr(node, "value", None)
    if isinstance(value, str) and len(value) < 80 and value.isidentifier():
        reading.words.add(value)


_HANDLERS = {
    ast.Import: _visit_import,
    ast.ImportFrom: _visit_import,
    ast.FunctionDef: _visit_function,
    ast.AsyncFunctionDef: _visit_function,
    ast.ClassDef: _visit_function,
    ast.If: _visit_if,
    ast.For: _visit_loop,
    ast.AsyncFor: _visit_loop,
    ast.While: _visit_loop,
    ast.With: _visit_with,
    ast.AsyncWith: _visit_with,
    ast.Try: _visit_with,
    ast.ListComp: _visit_comprehension,
    ast.SetComp: _visit_comprehension,
    ast.GeneratorExp: _visit_comprehension,
    ast.DictComp: _visit_comprehension,
    ast.Assign: _visit_assign,
    ast.AnnAssign: _visit_assign,
    ast.AugAssign: _visit_assign,
    ast.Delete: _visit_delete,
    ast.Call: _visit_call,
    ast.Attribute: _visit_attribute,
    ast.Constant: _visit_constant,
}
