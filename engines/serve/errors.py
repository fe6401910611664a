"""Errors as a client sees them: OpenAI's JSON shape, the field by name, what was expected and found.

It does not know engines or routes. Rules: every answer that is no success has the same shape; a message never
repeats more than a short piece of what was sent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NoReturn

from harness.suggest import did_you_mean

SHOWN = 60  # characters of a refused value that a message repeats
UNIONS = {
    "content": "a string or a list of text parts",
    "prompt": "a string, a list of strings, a list of token ids or a list of lists of token ids",
    "json": "a JSON schema, as an object or as its text",
    "stop": "a string or a list of strings",
}
REFUSED = {  # fields of OpenAI's or other servers' APIs that are known and not offered, with the reason
    "add_special_tokens": "text is tokenised without special tokens; write them in the text or send token ids",
    "audio": "this engine writes text alone",
    "best_of": "choices are never discarded; use n",
    "chat_template": "the model's own template is used, so that its digest holds",
    "continue_final_message": "the assistant's turn is always opened",
    "functions": "this engine calls no tools",
    "guided_choice": "it is structured_outputs.choice now",
    "guided_grammar": "it is structured_outputs.grammar now",
    "guided_json": "it is structured_outputs.json now",
    "guided_regex": "it is structured_outputs.regex now",
    "modalities": "this engine writes text alone",
    "parallel_tool_calls": "this engine calls no tools",
    "skip_special_tokens": "text shows every token but the one that ended it",
    "suffix": "nothing is inserted in the middle",
    "tool_choice": "this engine calls no tools",
    "tools": "this engine calls no tools",
    "use_beam_search": "there is no beam search",
}


class ApiError(Exception):
    """One refused or failed request: HTTP status, message, and the field and code of OpenAI's error object."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        """`param` is the field's path in the body, None if no field is to blame."""
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code


def refuse(param: str, expected: str, found: object, code: str | None = None) -> NoReturn:
    """Raises ApiError 400 for one field."""
    raise ApiError(400, f"{param}: expected {expected}, got {shown(found)}", param, code)


def error_body(error: ApiError) -> dict[str, object]:
    """`{"error": {message, type, param, code}}`."""
    kind = "invalid_request_error" if error.status < 500 else "server_error"
    return {"error": {"message": str(error), "type": kind, "param": error.param, "code": error.code}}


def shown(value: object) -> str:
    """A short form of a value."""
    text = repr(value)
    return text if len(text) <= SHOWN else text[: SHOWN - 1] + "…"


def from_validation(faults: Sequence[Mapping[str, object]], known: Sequence[str]) -> ApiError:
    """One error from pydantic's list: the first field's, with the number of the others.

    `known` are the field names of the body, for suggestions. Branches of a union count as one fault.
    """
    fields = list(dict.fromkeys(_path(fault) for fault in faults))
    first = [fault for fault in faults if _path(fault) == fields[0]]
    more = f" (and {len(fields) - 1} more: {', '.join(fields[1:4])})" if len(fields) > 1 else ""
    return ApiError(400, _sentence(first, fields[0], known) + more, fields[0] or None)


def _path(fault: Mapping[str, object]) -> str:
    """`messages[0].role`: the place without the leading "body" and without the names of union branches."""
    path = ""
    for part in _location(fault)[1:]:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part.isidentifier() or not path:
            path += f".{part}" if path else part
        if path.rpartition(".")[2] in UNIONS:
            break
    return path.encode("ascii", "backslashreplace").decode()[:SHOWN]


def _location(fault: Mapping[str, object]) -> tuple[str | int, ...]:
    location = fault["loc"]
    if not isinstance(location, tuple):
        raise TypeError(f"expected a tuple as the place of a fault, got {location!r}")
    return location


def _sentence(faults: Sequence[Mapping[str, object]], path: str, known: Sequence[str]) -> str:
    fault, name = faults[0], path.rpartition(".")[2]
    if fault["type"] == "json_invalid":
        return "the body is no JSON"
    if not path:
        return "the body: expected a JSON object with content-type application/json"
    if fault["type"] == "missing":
        return f"{path}: is required"
    if path in REFUSED:
        return f"{path}: {shown(fault['input'])} is not offered; {REFUSED[path]}"
    if fault["type"] == "extra_forbidden":
        return f"{path}: no such field; {did_you_mean(name, known)}" if path == name else f"{path}: no such field"
    lone = next((one for one in faults if "surrogate" in str(one["msg"])), None)
    if name in UNIONS and lone is None:
        return f"{path}: expected {UNIONS[name]}, got {shown(fault['input'])}"
    told = lone or fault
    return f"{path}: {str(told['msg']).removeprefix('Value error, ')}, got {shown(told['input'])}"
