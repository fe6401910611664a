"""What names mean in a Python file: import aliases, and names bound exactly once to a literal.

It follows no control flow; a name bound twice means nothing.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass, field

_MAX_CHAIN = 20


@dataclass(slots=True)
class Names:
    """Aliases from imports, and single bindings."""

    aliases: dict[str, str] = field(default_factory=dict)
    bound: dict[str, ast.expr] = field(default_factory=dict)
    modules: set[str] = field(default_factory=set)  # top-level packages imported anywhere
    clients: list[ast.Call] = field(default_factory=list)  # openai.OpenAI(...) constructions
    seeded: set[str] = field(default_factory=set)  # `random.seed` and the like called with a literal
    strings: set[str] = field(default_factory=set)  # short constants, for names read from the environment

    def dotted(self, node: ast.AST | None) -> str:
        """`torch.backends.cudnn` for an attribute chain, import aliases resolved; "" for anything else."""
        parts: list[str] = []
        while isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        if not isinstance(node, ast.Name):
            return ""
        head = self.aliases.get(node.id, node.id)
        return ".".join([head, *reversed(parts)])

    def literal(self, node: ast.expr | None) -> ast.expr | None:
        """The expression a name stands for; other expressions stand for themselves."""
        for _ in range(_MAX_CHAIN):
            if not isinstance(node, ast.Name) or node.id not in self.bound:
                return node
            node = self.bound[node.id]
        return node

    def text(self, node: ast.expr | None) -> str | None:
        """A constant as the environment would hold it; None when it is not certain."""
        found = self.literal(node)
        if isinstance(found, ast.Call) and self.dotted(found.func) == "str" and len(found.args) == 1:
            found = self.literal(found.args[0])
        if isinstance(found, ast.Constant) and not isinstance(found.value, bytes):
            return None if found.value is None else str(found.value)
        return None

    def item(self, table: ast.Dict, key: str) -> ast.expr | None:
        """The value under a constant key of a dict display."""
        for name, value in zip(table.keys, table.values, strict=True):
            if name is not None and self.text(name) == key:
                return value
        return None

    def words(self, node: ast.expr) -> list[str] | None:
        """A list or tuple of arguments as words; computed ones become NUL. None when it is no display."""
        found = self.literal(node)
        if isinstance(found, ast.BinOp) and isinstance(found.op, ast.Add):
            left, right = self.words(found.left), self.words(found.right)
            return None if left is None else [*left, *(right if right is not None else ["\0"])]
        if not isinstance(found, ast.List | ast.Tuple):
            return None
        return [self._word(element) for element in found.elts]

    def _word(self, element: ast.expr) -> str:
        if self.dotted(element) == "sys.executable":
            return "python"
        if isinstance(element, ast.JoinedStr):
            return "".join(
                part.value if isinstance(part, ast.Constant) and isinstance(part.value, str) else "\0"
                for part in element.values
            )
        text = self.text(element)
        return "\0" if text is None else text


def child_nodes(node: ast.AST) -> list[ast.AST]:
    """Direct children in source order, without the Load and Store marks: `ast.iter_child_nodes`, faster."""
    found: list[ast.AST] = []
    for value in node.__dict__.values():
        if value.__class__ is list:
            found.extend(item for item in value if isinstance(item, ast.AST))
        elif isinstance(value, ast.AST) and not isinstance(value, ast.expr_context):
            found.append(value)
    return found


def collect_names(tree: ast.Module) -> Names:
    """Aliases and single bindings of a whole file."""
    names = Names()
    twice: set[str] = set()
    calls: list[ast.Call] = []
    stack: list[ast.AST] = [tree]
    while stack:
        node = stack.pop()
        stack.extend(child_nodes(node))
        if isinstance(node, ast.Call):
            calls.append(node)
        elif isinstance(node, ast.Constant):
            if isinstance(node.value, str) and len(node.value) < 60:
                names.strings.add(node.value)
        elif not isinstance(node, ast.Name | ast.Attribute):
            _note_binding(names, twice, node)
    for name in twice:
        names.bound.pop(name, None)
    _note_calls(names, calls)
    return names


def _note_binding(names: Names, twice: set[str], node: ast.AST) -> None:
    if isinstance(node, ast.Assign):
        if len(node.targets) == 1:
            _bind(names, twice, node.targets[0], node.value)
    elif isinstance(node, ast.arg):
        twice.add(node.arg)
    elif isinstance(node, ast.Import):
        _add_import(names, node)
    elif isinstance(node, ast.ImportFrom):
        names.modules.add((node.module or "").split(".")[0])
        for alias in node.names:
            names.aliases[alias.asname or alias.name] = f"{node.module or ''}.{alias.name}".lstrip(".")
    elif isinstance(node, ast.AnnAssign):
        if node.value is not None:
            _bind(names, twice, node.target, node.value)
    elif isinstance(node, ast.AugAssign | ast.For | ast.AsyncFor | ast.comprehension):
        _forget(twice, node.target)


def _note_calls(names: Names, calls: list[ast.Call]) -> None:
    for node in calls:
        name = names.dotted(node.func)
        if name.startswith("openai.") and name.endswith("OpenAI"):
            names.clients.append(node)
        if name.endswith(".seed") and node.args and names.text(node.args[0]) is not None:
            names.seeded.add(name)


def _add_import(names: Names, node: ast.Import) -> None:
    for alias in node.names:
        names.modules.add(alias.name.split(".")[0])
        if alias.asname:
            names.aliases[alias.asname] = alias.name


def _bind(names: Names, twice: set[str], target: ast.expr, value: ast.expr) -> None:
    if not isinstance(target, ast.Name):
        return
    if target.id in names.bound:
        twice.add(target.id)
    names.bound[target.id] = value


def _forget(twice: set[str], target: ast.expr) -> None:
    for node in ast.walk(target):
        if isinstance(node, ast.Name):
            twice.add(node.id)
