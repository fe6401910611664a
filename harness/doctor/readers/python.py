"""Python scripts through `ast`: environment settings, engine starts, requests and the calls people believe in.

It knows names and calls, not values: a name bound once to a literal is that literal, everything else is unknown.
Nothing is imported or evaluated.
"""

from __future__ import annotations

import ast
import re
import sys
import warnings
from dataclasses import dataclass, field, replace

from harness.doctor.accelerator import accelerator_test
from harness.doctor.facts import Blocked, Call, Document, EnvSet, Install, Problem, Request, Start, overflow
from harness.doctor.finding import Place
from harness.doctor.readers.python_names import Names, child_nodes, collect_names
from harness.doctor.readers.python_processes import read_process
from harness.doctor.readers.python_requests import read_request_call
from harness.doctor.readers.python_starts import read_start
from harness.doctor.variables import VARIABLES

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
    r"environ|putenv|unsetenv|SamplingParams|\bLLM\b|EngineArgs|sglang|deepinfer|tensorrt_llm|openai|anthropic|"
    r"subprocess|os\.system|\.post\(|\.request\(|manual_seed|set_seed|deterministic|cudnn|seed_everything|dotenv"
)
_VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"
_SWITCHES = frozenset({"torch.backends.cudnn.deterministic", "torch.backends.cudnn.benchmark"})


@dataclass(slots=True, kw_only=True)
class Reading:
    """What has been seen so far, and where in the program we are."""

    path: str
    names: Names
    functions: tuple[str, ...] = ()
    branch: tuple[str, ...] = ()
    guard: str = ""
    missing: tuple[str, ...] = ()  # variables that an enclosing `not in os.environ` test names
    remote: bool = False  # inside a function or class that Ray runs elsewhere
    loops: list[ast.expr] = field(default_factory=list)
    settings: list[EnvSet] = field(default_factory=list)
    children: dict[str, list[EnvSet]] = field(default_factory=dict)  # settings of a copied environment, by name
    starts: list[Start] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    installs: list[Install] = field(default_factory=list)
    imports: list[tuple[str, int, str]] = field(default_factory=list)  # module, line, function
    called: dict[str, int] = field(default_factory=dict)  # first line at which a function is called at module level
    ray: ast.Call | None = None
    remote_starts: set[int] = field(default_factory=set)
    inner: set[EnvSet] = field(default_factory=set)  # settings made inside remote code
    words: set[str] = field(default_factory=set)
    open: str = ""

    def place(self, node: ast.AST) -> Place:
        return Place(self.path, getattr(node, "lineno", 1))

    @property
    def function(self) -> str:
        return ".".join(self.functions)


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
    settings = tuple(_mark_late(reading, setting) for setting in reading.settings)
    starts = tuple(
        _with_environment(reading, start, settings, remote=number in reading.remote_starts)
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
            reading.guard = reading.guard or accelerator_test(_text(statement.test))
    reading.guard = kept


def _leaves(body: list[ast.stmt]) -> bool:
    """Whether an arm quietly leaves the block (a raise is not quiet)."""
    return isinstance(body[-1], ast.Return | ast.Continue | ast.Break)


def _text(node: ast.AST) -> str:
    return ast.unparse(node)[:300]


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
        if "ray.remote" in _text(decorator):
            reading.remote = True
    reading.functions = (*reading.functions, node.name)
    reading.guard, reading.loops = "", []
    _visit_body(reading, node.body)
    reading.functions, reading.branch, reading.guard, reading.remote, reading.loops = kept


def _visit_if(reading: Reading, node: ast.AST) -> None:
    assert isinstance(node, ast.If)  # noqa: S101
    _visit(reading, node.test)
    test = _text(node.test)
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
    if not node.orelse:
        return False
    text = "\n".join(ast.unparse(statement) for statement in node.orelse)[:5000]
    return any(word in text for word in ("raise ", "sys.exit", "os.environ", "exit(", "assert "))


def _visit_loop(reading: Reading, node: ast.AST) -> None:
    if isinstance(node, ast.For | ast.AsyncFor):
        _visit(reading, node.iter)
        if _set_from_items(reading, node):
            return
        reading.loops.append(node.iter)
    elif isinstance(node, ast.While):
        _visit(reading, node.test)
        reading.loops.append(node.test)
    assert isinstance(node, ast.For | ast.AsyncFor | ast.While)  # noqa: S101
    _visit_body(reading, node.body)
    reading.loops.pop()
    _visit_body(reading, node.orelse)


def _set_from_items(reading: Reading, node: ast.For | ast.AsyncFor) -> bool:
    """`for key, value in {...}.items(): os.environ[key] = value`."""
    call = node.iter
    if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr == "items"):
        return False
    table = reading.names.literal(call.func.value)
    target = node.target
    if not (isinstance(table, ast.Dict) and isinstance(target, ast.Tuple) and len(target.elts) == 2):
        return False
    text = _text(ast.Module(body=node.body, type_ignores=[]))
    key, value = _text(target.elts[0]), _text(target.elts[1])
    plain, default = f"os.environ[{key}] = {value}", f"os.environ.setdefault({key}, {value})"
    if plain not in text and default not in text:
        return False
    how = "setdefault" if default in text and plain not in text else ""
    _set_table(reading, table, node, how)
    return True


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
            _set_item(reading, target, value, node)
        name = reading.names.dotted(target)
        if name in _SWITCHES and value is not None:
            _switch(reading, name, value, node)
        if isinstance(node, ast.AugAssign) and name == "os.environ" and value is not None:
            table = reading.names.literal(value)
            if isinstance(table, ast.Dict):
                _set_table(reading, table, node, "")
    if value is not None:
        _visit(reading, value)


def _switch(reading: Reading, name: str, value: ast.expr, node: ast.AST) -> None:
    wanted = "False" if name.endswith("benchmark") else "True"
    if _text(value) == wanted:
        reading.calls.append(Call(name=f"{name} = {wanted}", place=reading.place(node)))


def _set_item(reading: Reading, target: ast.Subscript, value: ast.expr, node: ast.AST) -> None:
    owner = reading.names.dotted(target.value)
    key = reading.names.text(target.slice)
    if owner == "os.environ":
        if key is None:
            reading.open = reading.open or f"a computed name is set at line {reading.place(node).line}"
            return
        _set(reading, key, value, node, "")
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


def _set(reading: Reading, name: str, value: ast.expr | None, node: ast.AST, how: str) -> None:
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


def _set_table(reading: Reading, table: ast.Dict, node: ast.AST, how: str) -> None:
    for key, value in zip(table.keys, table.values, strict=True):
        name = reading.names.text(key) if key is not None else None
        if name is None:
            reading.open = reading.open or f"a computed table is set at line {reading.place(node).line}"
            continue
        line = value if len(table.keys) > 1 else node
        _set(reading, name, value, line, how)


def _visit_delete(reading: Reading, node: ast.AST) -> None:
    assert isinstance(node, ast.Delete)  # noqa: S101
    for target in node.targets:
        if isinstance(target, ast.Subscript) and reading.names.dotted(target.value) == "os.environ":
            name = reading.names.text(target.slice)
            if name:
                _set(reading, name, None, node, "")


def _visit_call(reading: Reading, node: ast.AST) -> None:
    assert isinstance(node, ast.Call)  # noqa: S101
    name = reading.names.dotted(node.func)
    if not reading.functions and isinstance(node.func, ast.Name):
        reading.called.setdefault(node.func.id, node.lineno)
    _read_environment_call(reading, name, node)
    if name in _BELIEVED and not (name.endswith("algorithms") and node.args and _text(node.args[0]) == "False"):
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


def _read_environment_call(reading: Reading, name: str, node: ast.Call) -> None:
    arguments = node.args
    if name in ("os.environ.setdefault", "os.putenv", "os.environ.pop", "os.unsetenv") and arguments:
        key = reading.names.text(arguments[0])
        if key is None:
            reading.open = reading.open or f"a computed name is set at line {node.lineno}"
        elif name in ("os.environ.pop", "os.unsetenv"):
            _set(reading, key, None, node, "")
        elif len(arguments) > 1:
            _set(reading, key, arguments[1], node, "setdefault" if name.endswith("setdefault") else "")
    elif name == "os.environ.update":
        _read_update(reading, node)
    elif name.endswith("load_dotenv") and arguments:
        reading.words.add("load_dotenv(path)")


def _read_update(reading: Reading, node: ast.Call) -> None:
    for argument in node.args:
        table = reading.names.literal(argument)
        if isinstance(table, ast.Dict):
            _set_table(reading, table, node, "")
        else:
            reading.open = reading.open or f"os.environ is updated from something computed at line {node.lineno}"
    for keyword in node.keywords:
        if keyword.arg:
            _set(reading, keyword.arg, keyword.value, keyword.value, "")


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


def _mark_late(reading: Reading, setting: EnvSet) -> EnvSet:
    variable = VARIABLES.get(setting.name)
    if variable is None or setting.unset:
        return setting
    if setting.name == "PYTHONHASHSEED":
        return replace(setting, late="the interpreter read it when it started")
    line = _effective_line(reading, setting)
    for module, at, function in reading.imports:
        if module.split(".")[0] not in variable.modules:
            continue
        same = function == setting.scope and at < setting.place.line
        before = function == "" and (line is None or at < line)
        if same or before:
            return replace(setting, late=f"`{module.split('.')[0]}` was imported at line {at}")
    return setting


def _effective_line(reading: Reading, setting: EnvSet) -> int | None:
    """When a setting runs, in module lines: its own line, or the first call of the function it is in (None: later)."""
    if not setting.scope:
        return setting.place.line
    return reading.called.get(setting.scope.split(".")[0])


def _with_environment(reading: Reading, start: Start, settings: tuple[EnvSet, ...], *, remote: bool) -> Start:
    """A start with the settings that reach it, and those that Ray or a replaced environment keeps away."""
    reaching, blocked = _split_for_ray(reading, settings, remote=remote)
    if start.reach == "replaced":
        reason = "`env=` replaces the whole environment of the child"
        blocked += [Blocked(setting=item, place=start.place, reason=reason) for item in reaching if not item.unset]
        reaching = []
    child = tuple(reading.children.get(start.scope, ()))
    own = (*reaching, *start.settings, *child)
    names = {item.name for item in (*start.settings, *child)}
    blocked = [lost for lost in blocked if lost.setting.name not in names]
    return replace(start, settings=own, blocked=(*start.blocked, *blocked), open=start.open or reading.open, scope="")


def _split_for_ray(
    reading: Reading, settings: tuple[EnvSet, ...], *, remote: bool
) -> tuple[list[EnvSet], list[Blocked]]:
    if not remote or reading.ray is None:
        return list(settings), []
    given, closed = _runtime_variables(reading, reading.ray)
    if not closed:
        return [*settings, *given], []
    inner = {(item.name, item.place) for item in reading.inner}
    reaching = [item for item in settings if (item.name, item.place) in inner]
    names = {item.name for item in (*given, *reaching)}
    reason = "`ray.init` does not pass it to the workers (runtime_env has no env_vars for it)"
    place = reading.place(reading.ray)
    lost = [
        Blocked(setting=item, place=place, reason=reason)
        for item in settings
        if item.name not in names and not item.unset
    ]
    return [*given, *reaching], lost


def _runtime_variables(reading: Reading, call: ast.Call) -> tuple[list[EnvSet], bool]:
    """env_vars of ray.init's runtime_env, and whether they are all that a worker gets from the driver."""
    keywords = {keyword.arg: keyword.value for keyword in call.keywords}
    if None in keywords:
        return [], False
    value = keywords.get("runtime_env")
    if value is None:
        return [], "address" in keywords or bool(call.args)
    table = reading.names.literal(value)
    if not isinstance(table, ast.Dict):
        return [], False
    inner = reading.names.item(table, "env_vars")
    variables = reading.names.literal(inner) if inner is not None else None
    if inner is not None and not isinstance(variables, ast.Dict):
        return [], False
    given = []
    for key, item in zip(variables.keys, variables.values, strict=True) if isinstance(variables, ast.Dict) else ():
        name = reading.names.text(key) if key is not None else None
        if name is None:
            return [], False
        given.append(EnvSet(name=name, value=reading.names.text(item), place=reading.place(item)))
    return given, True
