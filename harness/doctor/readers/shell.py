"""Shell and Slurm scripts, through tree-sitter's bash grammar: the environment at every command, in order.

It knows bash's words, not engines (that is `command`). Nothing is expanded by running it: a word whose text is not
certain holds UNKNOWN. Both arms of a condition are read as if run; the arm is kept with each setting. A function's body
counts where it is written.
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache

import tree_sitter
import tree_sitter_bash

from harness.doctor.accelerator import accelerator_test
from harness.doctor.command import Outcome, read_command
from harness.doctor.engines import name_hardware
from harness.doctor.facts import Blocked, Document, EnvSet, Problem, Start, overflow
from harness.doctor.finding import Place
from harness.doctor.process import UNKNOWN
from harness.doctor.readers.bodies import read_curl_body
from harness.doctor.readers.shell_state import ShellState, set_variable
from harness.doctor.readers.shell_words import assign_array, expand_words, read_word, source_text
from harness.doctor.variables import VARIABLES

MAX_BYTES = 512 * 1024
MAX_DEPTH = 150
MAX_SCRIPTS = 4  # `sh -c` inside `sh -c`
_GRAMMAR_GAPS = re.compile(r"^(for|select) \w+$")  # `for i` without `in` is legal and unknown to the grammar


class TooDeep(ValueError):  # noqa: N818 - caught in this file
    """A script nested deeper than any person writes."""


class TooMany(ValueError):  # noqa: N818 - caught in this file
    """A script with more starts or settings than any person writes."""


@cache
def _parser() -> tree_sitter.Parser:
    return tree_sitter.Parser(tree_sitter.Language(tree_sitter_bash.language()))


def read_shell(path: str, text: str) -> Document:
    """A shell script as facts; `problem` is set when the text is no shell."""
    return read_fragment(path, text, 0, {}, kind="shell")


def read_fragment(
    path: str,
    text: str,
    offset: int,
    exported: dict[str, EnvSet],
    *,
    kind: str = "shell",
    scope: str = "",
    nested: int = 0,
    slurm_export: str = "",
) -> Document:
    """Shell text that begins `offset` lines into `path`, with the environment it starts from."""
    if len(text) > MAX_BYTES:
        return _problem(path, text, kind, 1, f"a script of more than {MAX_BYTES // 1024} KiB is not read")
    root = _parser().parse(text.encode()).root_node
    problem: Problem | None = _find_problem(root, offset)
    if problem:
        return Document(path=path, kind=kind, problem=problem, text=text)
    state = ShellState(path=path, offset=offset, exported=dict(exported), scope=scope, nested=nested)
    state.slurm_export = slurm_export
    _read_slurm_header(state, text)
    try:
        _visit_block(state, root, 0)
    except (TooDeep, RecursionError):
        return _problem(path, text, kind, 1 + offset, f"nested deeper than {MAX_DEPTH} levels")
    except TooMany:
        problem = overflow(len(state.starts), len(state.settings)) or Problem(line=1, text="too many commands")
        return Document(path=path, kind=kind, problem=problem, text=text)
    return _document(state, kind, text)


def _problem(path: str, text: str, kind: str, line: int, words: str) -> Document:
    return Document(path=path, kind=kind, problem=Problem(line=line, text=words), text=text)


def _document(state: ShellState, kind: str, text: str) -> Document:
    return Document(
        path=state.path,
        kind=kind,
        settings=tuple(state.settings),
        starts=tuple(state.starts),
        requests=tuple(state.requests),
        images=tuple(state.images),
        installs=tuple(state.installs),
        sources=tuple(state.sources),
        blocked=tuple(state.blocked),
        text=text,
    )


def _find_problem(root: tree_sitter.Node, offset: int) -> Problem | None:
    if not root.has_error:
        return None
    stack = [root]
    while stack:
        node = stack.pop()
        if node.is_missing and not (node.type == "]" and node.parent and node.parent.type == "test_command"):
            wanted = node.type
            return Problem(line=node.start_point[0] + 1 + offset, text=f"`{wanted}` is missing here")
        if node.is_error:
            words = source_text(node)[:60].strip()
            if not _GRAMMAR_GAPS.match(words):
                first = words.splitlines()[0] if words else ""
                return Problem(line=node.start_point[0] + 1 + offset, text=f"no shell grammar fits `{first}`")
            continue
        if node.has_error:
            stack.extend(reversed(node.children))
    return None


def _read_slurm_header(state: ShellState, text: str) -> None:
    for number, line in enumerate(text.splitlines()[:200], 1 + state.offset):
        match = re.match(r"#SBATCH\s+(--export|--gres|--constraint|-C|--partition|--gpus)[= ](\S+)", line)
        if not match:
            continue
        if match[1] == "--export":
            _apply_job_export(state, match[2], Place(state.path, number))
        elif not state.hardware:
            state.hardware = name_hardware(match[2])


def _apply_job_export(state: ShellState, value: str, place: Place) -> None:
    if value.upper() in ("NONE", "NIL"):
        state.slurm_export = "NONE"
    for part in value.split(","):
        name, equals, text = part.partition("=")
        if equals:
            set_variable(state, EnvSet(name=name, value=text, place=place, scope=state.scope), export=True)


def _visit_block(state: ShellState, node: tree_sitter.Node, depth: int) -> None:
    if depth > MAX_DEPTH:
        raise TooDeep
    for child in node.named_children:
        _visit(state, child, depth + 1)


def _visit(state: ShellState, node: tree_sitter.Node, depth: int) -> None:
    if depth > MAX_DEPTH:
        raise TooDeep
    handler = _HANDLERS.get(node.type)
    if handler is not None:
        handler(state, node, depth)
    elif node.type in _TRANSPARENT:
        _visit_block(state, node, depth)


_TRANSPARENT = frozenset(
    {
        "program",
        "compound_statement",
        "subshell",
        "pipeline",
        "redirected_statement",
        "for_statement",
        "c_style_for_statement",
        "while_statement",
        "do_group",
        "negated_command",
        "function_definition",
        "heredoc_redirect",
        "command_substitution",
    }
)


def _in_branch(state: ShellState, arm: str, guard: str, node: tree_sitter.Node, depth: int) -> None:
    branch, kept = state.branch, state.guard
    state.branch = (*branch, arm)
    state.guard = guard or kept
    _visit(state, node, depth)
    state.branch, state.guard = branch, kept


def _visit_if(state: ShellState, node: tree_sitter.Node, depth: int) -> None:
    test = _condition_text(node)
    clauses = [child for child in node.named_children if child.type in ("elif_clause", "else_clause")]
    speaks = any(_speaks_up(clause, node) for clause in clauses if clause.type == "else_clause")
    guard = "" if speaks else accelerator_test(test)
    at = f"if:{node.start_point[0]}"
    before = True
    for child in node.children:
        if child.type == "then":
            before = False
        elif child.type in ("elif_clause", "else_clause"):
            own = "" if speaks or child.type == "else_clause" else accelerator_test(_condition_text(child))
            arm = f"{at}:{child.start_point[0]}"
            for inner in child.named_children:
                _in_branch(state, arm, own, inner, depth + 1)
        elif child.is_named and before:
            _visit(state, child, depth + 1)
        elif child.is_named:
            _in_branch(state, f"{at}:then", guard, child, depth + 1)


def _condition_text(node: tree_sitter.Node) -> str:
    parts = []
    for child in node.children:
        if child.type == "then":
            break
        if child.is_named:
            parts.append(source_text(child)[:300])
    return " ".join(parts)


def _speaks_up(clause: tree_sitter.Node, whole: tree_sitter.Node) -> bool:
    """An else arm that stops the script, or sets the same variable, is no silent skip."""
    text = source_text(clause)
    if re.search(r"\b(exit|return)\s+[1-9]|\bfail\b|\bdie\b", text):
        return True
    names = set(re.findall(r"\b([A-Z][A-Z0-9_]{4,})=", source_text(whole)[: -len(text) or None]))
    return any(f"{name}=" in text for name in names)


def _visit_list(state: ShellState, node: tree_sitter.Node, depth: int) -> None:
    """`test && action`: the action stands under the test."""
    children = node.named_children
    if len(children) != 2:
        _visit_block(state, node, depth)
        return
    left, right = children
    _visit(state, left, depth + 1)
    operator = next((child.type for child in node.children if not child.is_named), "")
    is_test = left.type in ("test_command", "negated_command") or _is_probe(source_text(left))
    if operator == "&&" and not is_test:
        _visit(state, right, depth + 1)
        return
    guard = accelerator_test(source_text(left)[:300]) if operator == "&&" else ""
    _in_branch(state, f"list:{node.start_byte}", guard, right, depth + 1)


def _is_probe(text: str) -> bool:
    return bool(re.match(r"\s*(command -v|which|type|test|hash|grep|nvidia-smi|rocm-smi|npu-smi)\b", text))


def _visit_case(state: ShellState, node: tree_sitter.Node, depth: int) -> None:
    subject = node.child_by_field_name("value")
    items = [child for child in node.named_children if child.type == "case_item"]
    default = any(source_text(item).lstrip().lstrip("(").startswith("*)") for item in items)
    guarded = "" if default or subject is None else accelerator_test(source_text(subject)[:300])
    for number, item in enumerate(items):
        for child in item.named_children:
            _in_branch(state, f"case:{node.start_point[0]}:{number}", guarded, child, depth + 1)


def _visit_declaration(state: ShellState, node: tree_sitter.Node, depth: int) -> None:
    words = source_text(node).split(None, 2)
    exports = words[0] == "export" or (len(words) > 1 and re.fullmatch(r"-\w*x\w*", words[1]) is not None)
    if words[0] == "export" and len(words) > 1 and words[1] == "-n":
        return
    for child in node.named_children:
        if child.type == "variable_assignment":
            _assign(state, child, export=exports, depth=depth)
        elif child.type == "variable_name" and exports:
            known = state.local.pop(source_text(child), None)
            if known is not None:
                set_variable(state, known, export=True)


def _visit_assignment(state: ShellState, node: tree_sitter.Node, depth: int) -> None:
    _assign(state, node, export=state.allexport, depth=depth)


def _assign(state: ShellState, node: tree_sitter.Node, *, export: bool, depth: int) -> None:
    name_node = node.child_by_field_name("name")
    value_node = node.child_by_field_name("value")
    if name_node is None or name_node.type != "variable_name":
        return
    name = source_text(name_node)
    if value_node is not None and value_node.type == "array":
        assign_array(state, name, value_node, append="+=" in source_text(node)[: len(name) + 2])
        return
    value, overridable = read_word(state, value_node, name) if value_node is not None else ("", "")
    _visit_substitutions(state, value_node, depth)
    setting = EnvSet(
        name=name,
        value=None if UNKNOWN in value else value,
        place=state.place(node),
        overridable=overridable,
        guard=state.guard,
        scope=state.scope,
        branch=state.branch,
    )
    set_variable(state, setting, export=export or name in state.exported)


def _visit_substitutions(state: ShellState, node: tree_sitter.Node | None, depth: int) -> None:
    if node is None or depth > MAX_DEPTH or b"$(" not in (node.text or b""):
        return
    for child in (node, *node.named_children):
        if child.type == "command_substitution":
            _visit_block(state, child, depth + 1)


def _visit_unset(state: ShellState, node: tree_sitter.Node, _depth: int) -> None:
    for child in node.named_children:
        name = source_text(child)
        if name in state.exported:
            before = state.exported[name]
            gone = replace(before, value=None, unset=True, place=state.place(node), overridable="", guard="")
            set_variable(state, replace(gone, branch=state.branch), export=True)
        state.local.pop(name, None)


def _visit_command(state: ShellState, node: tree_sitter.Node, depth: int) -> None:
    words: list[str] = []
    place = state.place(node)
    environment = dict(state.exported)
    for child in node.named_children:
        if child.type == "variable_assignment":
            _prefix_assignment(state, child, environment, depth)
        elif child.type not in ("file_redirect", "herestring_redirect", "heredoc_redirect", "comment"):
            inner = child.named_children[0] if child.type == "command_name" and child.named_children else child
            words.extend(expand_words(state, inner))
            _visit_substitutions(state, inner, depth)
    if words:
        _run(state, words, place, environment)
    if overflow(len(state.starts), len(state.settings)):
        raise TooMany


def _prefix_assignment(state: ShellState, node: tree_sitter.Node, environment: dict[str, EnvSet], depth: int) -> None:
    shadow = ShellState(
        path=state.path, offset=state.offset, exported=environment, local=state.local, arrays=state.arrays
    )
    shadow.branch, shadow.guard, shadow.scope = state.branch, state.guard, state.scope
    _assign(shadow, node, export=True, depth=depth)
    state.settings.extend(shadow.settings)
    environment.update(shadow.exported)


def _run(state: ShellState, words: list[str], place: Place, environment: dict[str, EnvSet]) -> None:
    name = words[0]
    if name in ("source", ".") and len(words) > 1:
        state.sources.append(words[1])
    elif name == "set":
        joined = " ".join(words[1:])
        if re.search(r"(^| )-\w*a|-o allexport", joined):
            state.allexport = True
        elif re.search(r"(^| )\+\w*a|\+o allexport", joined):
            state.allexport = False
    elif name == "eval":
        _take_outcome(state, Outcome(script=" ".join(words[1:]), environment=tuple(environment.values())), place)
    elif name not in (":", "echo", "printf", "true", "cd", "mkdir"):
        _start(state, words, place, environment)


def _start(state: ShellState, words: list[str], place: Place, environment: dict[str, EnvSet]) -> None:
    outcome = read_command(words, place, environment, slurm_export=state.slurm_export, scope=state.scope)
    starts = tuple(_add_local(state, start) for start in outcome.starts)
    _take_outcome(state, replace(outcome, starts=starts), place)


def _add_local(state: ShellState, start: Start) -> Start:
    """Settings that were assigned but never exported are lost to every command."""
    lost = []
    named = {setting.name for setting in start.settings}
    for setting in state.local.values():
        if setting.name in VARIABLES and setting.name not in named:
            reason = "it is assigned but not exported, so no command sees it"
            lost.append(Blocked(setting=setting, place=setting.place, reason=reason))
    hardware = start.hardware or state.hardware
    return replace(start, blocked=(*start.blocked, *lost), hardware=hardware)


def _take_outcome(state: ShellState, outcome: Outcome, place: Place) -> None:
    state.images.extend(outcome.images)
    state.installs.extend(outcome.installs)
    state.starts.extend(outcome.starts)
    if outcome.body:
        state.requests.extend(read_curl_body(outcome.body[0], outcome.body[1], place))
    if outcome.script and UNKNOWN not in outcome.script and state.nested < MAX_SCRIPTS:
        inner = read_fragment(
            state.path,
            outcome.script,
            place.line - 1,
            {setting.name: setting for setting in outcome.environment},
            scope=state.scope,
            nested=state.nested + 1,
            slurm_export=state.slurm_export,
        )
        starts = [replace(start, blocked=(*start.blocked, *outcome.blocked)) for start in inner.starts]
        state.starts.extend(starts)
        state.settings.extend(inner.settings)
        state.installs.extend(inner.installs)
        state.requests.extend(inner.requests)


_HANDLERS = {
    "if_statement": _visit_if,
    "list": _visit_list,
    "case_statement": _visit_case,
    "declaration_command": _visit_declaration,
    "variable_assignment": _visit_assignment,
    "variable_assignments": lambda state, node, depth: _visit_block(state, node, depth),
    "unset_command": _visit_unset,
    "command": _visit_command,
}
