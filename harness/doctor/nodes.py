"""A tree of maps, lists and scalars with line numbers, from YAML, JSON or TOML, built within bounds.

It knows no dialect (compose, Kubernetes, Helm). Aliases are followed by reference and never expanded; nesting stops at
100 levels and a file at 100,000 nodes, whatever its size. Scalars are text; `plain` tells an unquoted one.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from json.decoder import scanstring  # type: ignore[attr-defined]  # the C scanner, absent from the stubs
from typing import Literal

import yaml

MAX_DEPTH = 100
MAX_NODES = 100_000
MAX_TOML = 512 * 1024  # the standard parser takes quadratic time over long dotted keys


class Unparsable(ValueError):  # noqa: N818 - the rule's name
    """Text that does not parse; `line` counts from 1."""

    def __init__(self, line: int, text: str) -> None:
        super().__init__(text)
        self.line = line
        self.text = text


@dataclass(slots=True, eq=False)
class Node:
    """One value. A map keeps its pairs in order, duplicates included."""

    kind: Literal["map", "list", "scalar"]
    line: int
    value: str = ""
    plain: bool = True
    pairs: list[tuple[str, Node]] = field(default_factory=list)
    items: list[Node] = field(default_factory=list)
    key_lines: list[int] = field(default_factory=list)

    def get(self, key: str) -> Node | None:
        """The last value under `key`, or None."""
        found = None
        for name, node in self.pairs:
            if name == key:
                found = node
        return found

    def text(self, key: str) -> str:
        """The scalar under `key`, or ""."""
        node = self.get(key)
        return node.value if node is not None and node.kind == "scalar" else ""

    def lines(self) -> Iterator[tuple[str, Node, int]]:
        """Pairs with the line of their key."""
        for (key, node), line in zip(self.pairs, self.key_lines, strict=True):
            yield key, node, line


class _Builder:
    """Puts nodes together from begin, end and scalar events, with the bounds."""

    def __init__(self) -> None:
        self.roots: list[Node] = []
        self._stack: list[Node] = []
        self._keys: list[tuple[str, int] | None] = []
        self._count = 0

    def begin(self, node: Node) -> None:
        self.add(node)
        if len(self._stack) >= MAX_DEPTH:
            raise Unparsable(node.line, f"nested deeper than {MAX_DEPTH} levels")
        self._stack.append(node)
        self._keys.append(None)

    def end(self) -> None:
        self._stack.pop()
        pending = self._keys.pop()
        if pending is not None:
            raise Unparsable(pending[1], f"key `{pending[0][:40]}` has no value")

    def add(self, node: Node) -> None:
        self._count += 1
        if self._count > MAX_NODES:
            raise Unparsable(node.line, f"more than {MAX_NODES} values")
        if not self._stack:
            self.roots.append(node)
            return
        parent = self._stack[-1]
        if parent.kind == "list":
            parent.items.append(node)
            return
        key = self._keys[-1]
        if key is None:
            self._keys[-1] = (node.value if node.kind == "scalar" else "", node.line)
            return
        parent.pairs.append((key[0], node))
        parent.key_lines.append(key[1])
        self._keys[-1] = None


def parse_yaml(text: str) -> list[Node]:
    """The documents of a YAML stream. Raises Unparsable."""
    builder = _Builder()
    anchors: dict[str, Node] = {}
    try:
        for event in yaml.parse(text, Loader=_LOADER):
            _take_event(builder, anchors, event)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise Unparsable(mark.line + 1 if mark else 1, str(error.problem or error.context)) from error
    except (yaml.YAMLError, ValueError) as error:
        if isinstance(error, Unparsable):
            raise
        raise Unparsable(1, str(error).splitlines()[0][:200]) from error
    _merge_keys(builder.roots)
    return builder.roots


def _merge_keys(roots: list[Node]) -> None:
    """`<<: *anchor`: pairs that a map lacks come from the merged one. Bounded like everything else."""
    added = 0
    for root in roots:
        for node in walk_nodes(root):
            merged = [value for key, value in node.pairs if key == "<<" and value is not node]
            present = {key for key, _ in node.pairs}
            for source in (inner for value in merged for inner in (value.items or [value])):
                pairs = [] if source is node else list(source.lines())
                for key, value, line in pairs:
                    if key not in present and added < MAX_NODES:
                        present.add(key)
                        node.pairs.append((key, value))
                        node.key_lines.append(line)
                        added += 1


_LOADER: type[yaml.SafeLoader | yaml.CSafeLoader] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def _take_event(builder: _Builder, anchors: dict[str, Node], event: yaml.Event) -> None:
    line = event.start_mark.line + 1 if event.start_mark is not None else 1
    if isinstance(event, yaml.ScalarEvent):
        block = event.style in ("|", ">")  # the text begins on the line after the mark
        node = Node("scalar", line + block, event.value, plain=event.style in (None, ""))
        builder.add(node)
    elif isinstance(event, yaml.MappingStartEvent | yaml.SequenceStartEvent):
        node = Node("map" if isinstance(event, yaml.MappingStartEvent) else "list", line)
        builder.begin(node)
    elif isinstance(event, yaml.AliasEvent):
        builder.add(anchors.get(event.anchor or "", Node("scalar", line)))
        return
    elif isinstance(event, yaml.MappingEndEvent | yaml.SequenceEndEvent):
        builder.end()
        return
    else:
        return
    if event.anchor:
        anchors[event.anchor] = node


_JSON_TOKEN = re.compile(
    r'[\s,:]*+(?:(//[^\n]*|/\*.*?\*/|#[^\n]*)|([\[\]{}"])|([^\s,:\[\]{}"/#]+)|([^\s,:]))', re.DOTALL
)


def parse_json(text: str, first_line: int = 1) -> Node:
    """One JSON value; comments and trailing commas are let through. Raises Unparsable."""
    builder = _Builder()
    closers: list[str] = []
    position, line, counted = 0, first_line, 0
    while match := _JSON_TOKEN.match(text, position):
        start = match.start(match.lastindex or 0)
        line += text.count("\n", counted, start)
        counted = start
        position = match.end()
        if match[1]:
            continue
        if not closers and builder.roots:
            raise Unparsable(line, "text after the end of the value")
        position = _take_json(builder, closers, text, match, line)
    if closers or not builder.roots:
        raise Unparsable(line, "the text ends inside a value" if closers else "no value")
    return builder.roots[0]


def _take_json(builder: _Builder, closers: list[str], text: str, match: re.Match[str], line: int) -> int:
    mark = match[2]
    if mark == '"':
        try:
            value, end = scanstring(text, match.end(), False)
        except ValueError as error:
            raise Unparsable(line, "a string without its end or with a bad escape") from error
        builder.add(Node("scalar", line, value, plain=False))
        return int(end)
    if mark in ("{", "["):
        closers.append("}" if mark == "{" else "]")
        builder.begin(Node("map" if mark == "{" else "list", line))
    elif mark:
        if not closers or closers.pop() != mark:
            raise Unparsable(line, f"`{mark}` closes nothing")
        builder.end()
    elif match[3] and _JSON_WORD.fullmatch(match[3]):
        builder.add(Node("scalar", line, "" if match[3] == "null" else match[3]))
    else:
        raise Unparsable(line, f"`{(match[3] or match[4])[:30]}` is no JSON value")
    return match.end()


_JSON_WORD = re.compile(r"true|false|null|NaN|-?Infinity|-?\d{1,400}(\.\d{1,400})?([eE][-+]?\d{1,9})?")


def parse_toml(text: str) -> Node:
    """A TOML file; lines are found again by searching for the key. Raises Unparsable."""
    if len(text) > MAX_TOML:
        raise Unparsable(1, f"a TOML file of more than {MAX_TOML // 1024} KiB is not read")
    for number, line in enumerate(text.splitlines(), 1):
        if line.partition("=")[0].count(".") > MAX_DEPTH:
            raise Unparsable(number, f"a key of more than {MAX_DEPTH} parts")
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        at = re.search(r"line (\d+)", str(error))
        raise Unparsable(int(at[1]) if at else 1, str(error)[:200]) from error
    except (RecursionError, ValueError) as error:
        raise Unparsable(1, "nested too deeply or holding a number too long") from error
    return _from_toml(table, _KeyLines(text), 1, 0)


class _KeyLines:
    """Line numbers of `key =` and `[table]` lines, handed out in order."""

    def __init__(self, text: str) -> None:
        self._lines: dict[str, list[int]] = {}
        for number, line in enumerate(text.splitlines(), 1):
            match = re.match(r"\s*\[*\s*([^=\[\]#]{1,200})", line)
            if match:
                last = match[1].strip().split(".")[-1].strip().strip("\"'")
                self._lines.setdefault(last, []).append(number)

    def take(self, key: str, after: int) -> int:
        known = [line for line in self._lines.get(key, []) if line >= after]
        return known[0] if known else after


def _from_toml(value: object, lines: _KeyLines, line: int, depth: int) -> Node:
    if depth > MAX_DEPTH:
        raise Unparsable(line, f"nested deeper than {MAX_DEPTH} levels")
    if isinstance(value, dict):
        node = Node("map", line)
        for key, inner in value.items():
            at = lines.take(key, line)
            node.pairs.append((key, _from_toml(inner, lines, at, depth + 1)))
            node.key_lines.append(at)
        return node
    if isinstance(value, list):
        return Node("list", line, items=[_from_toml(inner, lines, line, depth + 1) for inner in value])
    text = str(value).lower() if isinstance(value, bool) else str(value)
    return Node("scalar", line, text, plain=not isinstance(value, str))


def walk_nodes(node: Node) -> Iterator[Node]:
    """Every node once, aliases included once, parents first."""
    seen: set[int] = set()
    stack = [node]
    while stack:
        current = stack.pop()
        if id(current) in seen:
            continue
        seen.add(id(current))
        yield current
        stack.extend(reversed(current.items))
        stack.extend(inner for _, inner in reversed(current.pairs))
