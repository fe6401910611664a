"""The words of a shell command: quotes, variables, defaults, arrays. What is not certain becomes UNKNOWN."""

from __future__ import annotations

import re
import shlex
from typing import TYPE_CHECKING

from harness.doctor.facts import EnvSet
from harness.doctor.process import UNKNOWN
from harness.doctor.readers.shell_state import ShellState, set_variable

if TYPE_CHECKING:
    import tree_sitter

MAX_WORDS = 2_000


def source_text(node: tree_sitter.Node) -> str:
    return (node.text or b"").decode(errors="replace")


def expand_words(state: ShellState, node: tree_sitter.Node) -> list[str]:
    """The words one argument becomes: arrays and unquoted variables may become several."""
    array = re.fullmatch(r'"?\$\{(\w+)\[[@*]\]\}"?', source_text(node))
    if array and array[1] in state.arrays:
        return list(state.arrays[array[1]])
    text = read_word(state, node, "")[0]
    if node.type in ("simple_expansion", "expansion") and UNKNOWN not in text:
        try:
            return shlex.split(text)
        except ValueError:
            return text.split()
    return [text]


def assign_array(state: ShellState, name: str, node: tree_sitter.Node, *, append: bool) -> None:
    words = [word for child in node.named_children if child.type != "comment" for word in expand_words(state, child)]
    known = state.arrays.get(name, []) if append else []
    state.arrays[name] = [*known, *words][:MAX_WORDS]


def read_word(state: ShellState, node: tree_sitter.Node, assigning: str) -> tuple[str, str]:
    """A word's text, UNKNOWN where it is not certain, and how it can be overridden ("" when it cannot)."""
    kind = node.type
    if kind in ("word", "number", "variable_name", "test_operator", "file_descriptor", "extglob_pattern", "regex"):
        return re.sub(r"\\(.)", r"\1", source_text(node), flags=re.DOTALL), ""
    if kind == "raw_string":
        return source_text(node)[1:-1], ""
    if kind == "string":
        return _read_string(state, node, assigning)
    if kind == "concatenation":
        pieces = [read_word(state, child, assigning) for child in node.named_children]
        return "".join(text for text, _ in pieces), next((how for _, how in pieces if how), "")
    if kind == "simple_expansion":
        return _known_value(state, source_text(node)[1:]), ""
    if kind == "expansion":
        return _read_expansion(state, node, assigning)
    if kind == "command_substitution" and re.match(r"(\$\(|`)\s*date\b", source_text(node)):
        return f"{UNKNOWN}CLOCK", ""
    return UNKNOWN, ""


def _read_string(state: ShellState, node: tree_sitter.Node, assigning: str) -> tuple[str, str]:
    text: list[str] = []
    how = ""
    position = node.start_byte + 1
    raw = node.text or b""
    for child in node.named_children:
        text.append(raw[position - node.start_byte : child.start_byte - node.start_byte].decode(errors="replace"))
        position = child.end_byte
        if child.type == "string_content":
            text.append(re.sub(r'\\(["\\$`\n])', r"\1", source_text(child)))
        else:
            piece, found = read_word(state, child, assigning)
            text.append(piece)
            how = how or found
    text.append(raw[position - node.start_byte : -1].decode(errors="replace"))
    return "".join(text), how


def _known_value(state: ShellState, name: str) -> str:
    setting = state.local.get(name) or state.exported.get(name)
    if name == "RANDOM":
        return f"{UNKNOWN}RANDOM"
    if (
        setting is None
        or setting.value is None
        or setting.unset
        or setting.branch != state.branch[: len(setting.branch)]
    ):
        return UNKNOWN
    return setting.value


def _read_expansion(state: ShellState, node: tree_sitter.Node, assigning: str) -> tuple[str, str]:
    """`${NAME}` and `${NAME:-default}`; the rest is unknown."""
    match = re.fullmatch(r"\$\{(\w+)(?:(:?[-=])(.*))?\}", source_text(node), re.DOTALL)
    if match is None:
        return UNKNOWN, ""
    name, operator, default = match[1], match[2], match[3]
    if operator is None:
        return _known_value(state, name), ""
    known = _known_value(state, name)
    if known != UNKNOWN and name != assigning:
        return known, ""
    value = default.strip("\"'")
    if "$" in value or "`" in value:
        value = UNKNOWN
    if "=" in operator:
        how = f"${{{name}{operator}{default}}}"
        setting = EnvSet(name=name, value=value, place=state.place(node), overridable=how, branch=state.branch)
        set_variable(state, setting, export=state.allexport or name in state.exported)
    return value, f"${{{name}{operator}{default}}}"
