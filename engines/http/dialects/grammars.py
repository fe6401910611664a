"""How each interface spells a grammar. It compiles and sends nothing.

Fields: OpenAI's `response_format`; vLLM 0.32 `sampling_params.py` (StructuredOutputsParams); SGLang
`srt/sampling/sampling_params.py` and `srt/entrypoints/openai/protocol.py`; llama.cpp `tools/server/README.md`; TGI's
published schema of `text-generation`. Rules: a kind that an interface has no word for is refused by its name; a schema
is sent as the type the interface reads, an object or its text; EBNF is handed on as it is, for its dialect is the
server's own: llama.cpp reads GBNF alone, so Lark is refused there.
"""

from __future__ import annotations

import json
import re
from typing import Literal

from engines.http.dialect import refuse
from engines.http.shape import Json
from harness.request import Grammar, Request

Spelling = Literal["openai", "vllm", "sglang", "llamacpp", "tgi", "none"]
_LARK = re.compile(r"^\s*start\s*:", re.MULTILINE)  # docs/sampling.md: what begins a line so is Lark, all else GBNF


def spell_grammar(request: Request, grammar: Grammar, spelling: Spelling, *, chat: bool = False) -> Json:
    """The members of a body, or of its parameters, that carry the grammar. Raises Unsupported, naming the request."""
    kind, text = grammar.kind, grammar.text
    if spelling == "vllm":
        return {"structured_outputs": {{"json_schema": "json", "regex": "regex", "ebnf": "grammar"}[kind]: text}}
    if spelling == "sglang" and not (chat and kind == "json_schema"):
        return {kind: text}
    if spelling in ("openai", "sglang") and chat and kind == "json_schema":
        schema = {"name": "answer", "strict": True, "schema": _schema(request, text)}
        return {"response_format": {"type": "json_schema", "json_schema": schema}}
    if spelling == "llamacpp" and kind == "json_schema":
        return {"json_schema": _schema(request, text)}
    if spelling == "llamacpp" and kind == "ebnf" and not _LARK.search(text):
        return {"grammar": text}
    if spelling == "tgi" and kind != "ebnf":
        value = _schema(request, text) if kind == "json_schema" else text
        return {"grammar": {"type": "json" if kind == "json_schema" else kind, "value": value}}
    raise refuse(request, f"grammar ({kind})", "this interface has no word for it")


def _schema(request: Request, text: str) -> object:
    try:
        return json.loads(text)
    except ValueError as error:
        raise refuse(request, "grammar (json_schema)", f"its text is no JSON: {error}") from error
