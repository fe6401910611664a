"""Structured outputs: a grammar over text becomes, position by position, the set of tokens that may come next.

The parsing is llguidance's; this module knows no logits and no sampling. Rules: a grammar is compiled once per
content; what is allowed depends on the grammar and the sequence's own output alone; only what the engine took moves
a constraint on, so preemption and rejected proposals leave nothing to undo; JSON is written without white space
between its parts, unless the schema's own `x-guidance` says otherwise.
"""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from engines.bundled.errors import ComputeError, NotSupported, RequestError
from engines.bundled.request import Grammar, Request
from engines.bundled.tokenizer import BytePieces, Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

Allowed = npt.NDArray[np.bool_]

MOST_KEPT = 64  # compiled grammars
_REGEX_FAULT = re.compile(r"regex parse error:\n    (?P<text>.*)\n    (?P<before> *)\^.*\n(?:.*\n)*?error: (?P<why>.*)")
_LARK = re.compile(r"(?m)^\s*(%llguidance\b|start\s*:)")  # llguidance's own test; whatever has no such line is GBNF
_LARK_FAULT = re.compile(r"^(?:at )?(?P<line>\d+)\((?P<column>\d+)\): (?P<why>.*)")


class Constraint:
    """One grammar along one sequence's output."""

    def __init__(self, matcher: LLMatcher, vocab_size: int, ends: frozenset[int], request_id: str) -> None:
        """`matcher` is this constraint's own; the least of the end-of-sequence ids stands for all `ends`."""
        self._matcher = matcher
        self._size = vocab_size
        self._ends = sorted(ends)
        self._request_id = request_id
        self._allowed: Allowed | None = None

    def allowed(self) -> Allowed:
        """Which ids (vocab,) may come next; an end of sequence is among them once the output is complete.

        Raises ComputeError where the grammar grew beyond the parser's limits.
        """
        if self._allowed is None:
            bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
            if self._matcher.is_error():
                why = " ".join(self._matcher.get_error().split())
                msg = f"request {self._request_id!r}: its grammar cannot be followed further: {why}"
                raise ComputeError(msg, self._request_id)
            allowed = np.unpackbits(bits, bitorder="little")[: self._size].view(np.bool_)
            allowed[self._ends] = allowed[self._ends].any()
            self._allowed = allowed
        return self._allowed

    def advance(self, token: int) -> bool:
        """Takes a token; False, and nothing moves, if the grammar forbids it."""
        if not self.allowed()[token]:
            return False
        if token not in self._ends:
            self._matcher.consume_token(token)
            self._allowed = None
        return True


class Grammars:
    """The grammars of one tokenizer, compiled once each. Safe to use from several threads."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, ends: Iterable[int]) -> None:
        """`vocab_size` is the model's; `ends` are its end-of-sequence ids. Nothing is read before the first grammar."""
        self._tokenizer = tokenizer
        self._size = vocab_size
        self._ends = frozenset(ends)
        self._vocabulary: LLTokenizer | None = None
        self._compiled: OrderedDict[Grammar, LLMatcher] = OrderedDict()
        self._lock = threading.Lock()

    def start(self, request: Request) -> Constraint | None:
        """The request's constraint at the beginning of its output; None without a grammar. Raises RequestError."""
        grammar = request.grammar
        if grammar is None:
            return None
        try:
            matcher = self._compile(grammar)
        except ValueError as error:
            raise RequestError(f"request {request.id!r}: grammar ({grammar.kind}): {error}") from error
        return Constraint(matcher, self._size, self._ends, request.id)

    def find_fault(self, grammar: Grammar) -> str:
        """What is wrong with a grammar, in a sentence that begins with the place; "" if nothing is."""
        try:
            self._compile(grammar)
        except ValueError as error:
            return str(error)
        return ""

    def check(self, request: Request) -> None:
        """Raises RequestError for a grammar that cannot be compiled, or that the request's own fields contradict."""
        constraint = self.start(request)
        if request.grammar is None or constraint is None:
            return
        name, sampling = f"request {request.id!r}", request.sampling
        if sampling.ignore_eos or sampling.min_tokens:
            field = "ignore_eos: expected false" if sampling.ignore_eos else "min_tokens: expected 0"
            raise RequestError(f"{name}: {field} beside a grammar, which says by itself when the output may end")
        for index, token in enumerate(request.forced or ()):
            if not constraint.advance(token):
                kind = request.grammar.kind
                text = self._tokenizer.decode([token])
                raise RequestError(f"{name}: forced token {index} is {token} ({text!r}), which its grammar ({kind}) "
                                   "forbids there; the path must come from the same grammar")  # fmt: skip

    def _compile(self, grammar: Grammar) -> LLMatcher:
        """A fresh matcher. Raises ValueError with the place of what is wrong."""
        with self._lock:
            if grammar not in self._compiled:
                if self._vocabulary is None:
                    self._vocabulary = open_vocabulary(self._tokenizer, self._size, min(self._ends))
                matcher, fault = _match(self._vocabulary, grammar)
                if matcher is None:
                    raise ValueError(_place(self._vocabulary, grammar, fault))
                self._compiled[grammar] = matcher
            self._compiled.move_to_end(grammar)
            if len(self._compiled) > MOST_KEPT:
                self._compiled.popitem(last=False)
            return self._compiled[grammar].deep_copy()


def open_vocabulary(tokenizer: Tokenizer, vocab_size: int, end: int) -> LLTokenizer:
    """The bytes behind every id, as llguidance wants them; `end` is the end-of-sequence id. Raises NotSupported."""
    from llguidance import LLTokenizer, TokenizerWrapper

    definition = tokenizer.definition()
    try:
        if isinstance(definition, str):
            return LLTokenizer(definition, n_vocab=vocab_size, eos_token=end)
        return LLTokenizer(TokenizerWrapper(_Pieces(definition, vocab_size, end)), n_vocab=vocab_size)
    except ValueError as error:
        raise NotSupported(f"grammars over this tokenizer: {error}") from error


class _Pieces:
    """Ids that are bytes, then ids that are none, in the form that llguidance's wrapper asks for."""

    bos_token_id = None

    def __init__(self, pieces: BytePieces, vocab_size: int, end: int) -> None:
        self.eos_token_id = end
        self.special_token_ids = list(range(len(pieces), vocab_size))
        self.tokens = [*pieces, *(f"<|{token}|>".encode() for token in self.special_token_ids)]

    def __call__(self, text: bytes | str) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)


def _match(vocabulary: LLTokenizer, grammar: Grammar) -> tuple[LLMatcher | None, str]:
    """A matcher, or None and the library's complaint."""
    from llguidance import LLMatcher

    try:
        matcher = LLMatcher(vocabulary, _definition(grammar), log_level=0)
    except ValueError as error:  # text that is no JSON, or GBNF that cannot be rewritten
        return None, str(error)
    return (None, matcher.get_error()) if matcher.is_error() else (matcher, "")


def _definition(grammar: Grammar) -> str:
    from llguidance import LLMatcher, grammar_from

    if grammar.kind == "json_schema":
        return LLMatcher.grammar_from_json_schema(grammar.text, defaults={"whitespace_flexible": False})
    if grammar.kind == "regex":
        return LLMatcher.grammar_from_regex(grammar.text)
    return grammar_from("ebnf", grammar.text)


def _place(vocabulary: LLTokenizer, grammar: Grammar, fault: str) -> str:
    """The library's complaint as one sentence that begins with where in the grammar the mistake is."""
    if grammar.kind == "json_schema":
        return f"at {_schema_place(vocabulary, grammar, fault)}: {_sentence(fault)}"
    if grammar.kind == "ebnf" and not _LARK.search(grammar.text):
        return _sentence_of_gbnf(grammar.text, fault)
    return _sentence(fault)


def _sentence(fault: str) -> str:
    if found := _REGEX_FAULT.search(fault):
        return f"character {len(found['before']) + 1} of the expression {found['text']!r}: {found['why']}"
    if found := _LARK_FAULT.search(fault):
        return f"line {found['line']}, column {found['column']}: {found['why']}"
    return " ".join(fault.split())


def _sentence_of_gbnf(text: str, fault: str) -> str:
    """GBNF is rewritten before it is parsed, so lines are not the text's own: the name in a complaint is looked up."""
    found = _LARK_FAULT.search(fault)
    why = found["why"] if found else _sentence(fault)
    why = why.removeprefix("Failed to convert the grammar from GBNF to Lark: ")
    name = re.search(r"""['"`]([\w-]+)['"`]""", why)
    if name is None or " at line " in why:
        return why
    bare = re.sub(r'"(?:\\.|[^"\\])*"', lambda literal: " " * len(literal[0]), text)
    place = re.search(rf"(?<![\w-]){re.escape(name[1])}(?![\w-])", bare)
    if place is None:
        return why
    before = text[: place.start()]
    return f"line {before.count(chr(10)) + 1}, column {place.start() - before.rfind(chr(10))}: {why}"


def _schema_place(vocabulary: LLTokenizer, grammar: Grammar, fault: str) -> str:
    """The path of the smallest part of a schema that is refused for the same reason by itself."""
    try:
        schema = json.loads(grammar.text)
    except ValueError:
        return "$"
    found = (path for path, part in _parts("$", schema) if _match(vocabulary, _schema(part))[1] == fault)
    return next(found, "$")


def _schema(part: object) -> Grammar:
    return Grammar(kind="json_schema", text=json.dumps(part))


def _parts(path: str, value: object) -> Iterator[tuple[str, object]]:
    """Objects inside a JSON value with their paths, inner ones first."""
    inner: Iterable[tuple[str, object]] = ()
    if isinstance(value, dict):
        inner = ((f"{path}.{key}", child) for key, child in value.items())
    elif isinstance(value, list):
        inner = ((f"{path}[{index}]", child) for index, child in enumerate(value))
    for place, child in inner:
        yield from _parts(place, child)
    if isinstance(value, dict):
        yield path, value
