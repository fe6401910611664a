"""Structured outputs as bodies ask for them: OpenAI's `response_format`, vLLM's `structured_outputs`. Compiles nothing.

Rules: one constraint per request; a grammar's mistake is told under the field it came from.
"""

from __future__ import annotations

import json
from typing import NamedTuple

from engines.bundled.errors import NotSupported
from engines.bundled.grammar import Grammars
from engines.bundled.request import Grammar
from engines.serve.errors import ApiError, refuse
from engines.serve.protocol import ResponseFormat, SamplingBody, StructuredOutputs

ANY_OBJECT = Grammar(kind="json_schema", text='{"type": "object"}')


class Asked(NamedTuple):
    """A grammar, and the field of the body that asked for it."""

    grammar: Grammar
    field: str


def read_structured(body: SamplingBody, grammars: Grammars | None) -> Grammar | None:
    """The grammar a body asks for, compiled once to see that it can be. Raises ApiError naming the field."""
    found: list[Asked] = [
        *(_of_format(body.response_format) if body.response_format else ()),
        *(_of_outputs(body.structured_outputs) if body.structured_outputs else ()),
    ]
    if not found:
        return None
    if len(found) > 1:
        names = " and ".join(asked.field for asked in found)
        raise ApiError(400, f"{found[1].field}: expected one constraint, got {names}", found[1].field)
    asked = found[0]
    if body.ignore_eos:
        refuse("ignore_eos", f"false beside {asked.field}, which says by itself when the output may end", True)
    if body.min_tokens:
        refuse("min_tokens", f"0 beside {asked.field}, which says by itself when the output may end", body.min_tokens)
    _check(asked, grammars)
    return asked.grammar


def _check(asked: Asked, grammars: Grammars | None) -> None:
    if grammars is None:
        raise ApiError(400, f"{asked.field}: this engine knows no grammars", asked.field, "unsupported_parameter")
    try:
        fault = grammars.find_fault(asked.grammar)
    except NotSupported as error:
        raise ApiError(400, f"{asked.field}: {error}", asked.field, "unsupported_parameter") from error
    if fault:
        raise ApiError(400, f"{asked.field}: {fault}", asked.field, "invalid_grammar")


def _of_format(asked: ResponseFormat) -> list[Asked]:
    if asked.type == "json_schema":
        if asked.json_schema is None:
            refuse("response_format.json_schema", "a name and a schema, for type is 'json_schema'", None)
        schema = asked.json_schema.schema_
        return [Asked(_schema(ANY_OBJECT.text if schema is None else schema), "response_format.json_schema.schema")]
    if asked.json_schema is not None:
        refuse("response_format.type", "'json_schema' where a schema is given", asked.type)
    return [Asked(ANY_OBJECT, "response_format")] if asked.type == "json_object" else []


def _of_outputs(asked: StructuredOutputs) -> list[Asked]:
    at = "structured_outputs"
    found = []
    if asked.json_ is not None:
        found.append(Asked(_schema(asked.json_), f"{at}.json"))
    if asked.regex is not None:
        found.append(Asked(Grammar(kind="regex", text=asked.regex), f"{at}.regex"))
    if asked.choice is not None:
        words = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in asked.choice)
        found.append(Asked(Grammar(kind="ebnf", text=f"start: {words}"), f"{at}.choice"))
    if asked.grammar is not None:
        found.append(Asked(Grammar(kind="ebnf", text=asked.grammar), f"{at}.grammar"))
    if asked.json_object:
        found.append(Asked(ANY_OBJECT, f"{at}.json_object"))
    if not found:
        refuse(at, "one of json, regex, choice, grammar and json_object", None)
    return found


def _schema(schema: str | dict[str, object]) -> Grammar:
    return Grammar(kind="json_schema", text=schema if isinstance(schema, str) else json.dumps(schema))
