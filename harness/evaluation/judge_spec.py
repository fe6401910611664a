"""A judge that is a language model, as a TOML file says it: engine, model, settings, template, how its answer is read.

It does not ask anybody. Rules: unknown keys, wrong types and unknown names are mistakes, all reported at once; the
temperature is 0 and cannot be asked otherwise; a template's placeholders are filled in once, so that nothing an answer
says can become one.

    schema = 1
    name = "yes-or-no"
    engine = "bundled"
    model = "smollm2"                       without it the engine's first
    mode = "deterministic"                  optional; [settings] wins over it
    template = "… {question} … {expected} … {output} …"
    chat = false                            true: the template is a user's message in the model's chat template
    max_tokens = 1                          default: 1 for choices, 16 for a pattern
    [settings]                              the engine's own
    [parse]
    choices = [" Yes", " No"]               the one whose first token has the largest logprob at the first position
    pattern = "(?i)(yes|no)"                or: the first match's first group, or the whole match without groups
    points = [" Yes"]                       which readings earn the point
"""

from __future__ import annotations

import hashlib
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from harness import registry
from harness.choose import default_model
from harness.engine import Adapter, Rule, Scalar
from harness.errors import UsageError
from harness.matrix import schema_mistake
from harness.reader import Reader, shown
from harness.settings import Settings, mode_settings, resolve

SCHEMA = 1
PLACEHOLDER = re.compile(r"\{(\w+)\}")
PLACEHOLDERS = ("question", "expected", "output")
CHOICE_TOKENS, PATTERN_TOKENS = 1, 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Parse:
    """How a judge's output is read: by `choices` or by `pattern`, the other is empty. `points` earn."""

    choices: tuple[str, ...]
    pattern: str
    points: tuple[str, ...]

    @property
    def rule(self) -> Rule:
        """The weakest rule under which equal captures give equal readings."""
        return "topk" if self.choices else "tokens"


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeSpec:
    """One judge. `digest` is the SHA-256 of its file."""

    name: str
    adapter: Adapter
    model: str
    asked: Mapping[str, Scalar]  # settings by mode and by name, without defaults
    settings: Settings
    template: str
    chat: bool
    max_tokens: int
    parse: Parse
    digest: str

    def prompt(self, question: str, expected: str, output: str) -> str:
        """The template filled in."""
        values = {"question": question, "expected": expected, "output": output}
        return PLACEHOLDER.sub(lambda match: values[match[1]], self.template)

    @property
    def command(self) -> str:
        """How its own cells are run."""
        chosen = " ".join(f"--set {name}={_typed(value)}" for name, value in sorted(self.asked.items()))
        return f"samebits run eval --engine {self.adapter.name} --model {self.model} {chosen}".rstrip()


def read_judge(file: Path) -> JudgeSpec:
    """The judge of a file. Raises UsageError with everything that is wrong with it."""
    try:
        content = file.read_bytes()
        document = tomllib.loads(content.decode("utf-8"))
    except OSError as error:
        raise UsageError(f"--judge {file}: cannot be read: {error.strerror}") from error
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UsageError(f"--judge {file}: not TOML: {error}") from error
    message = schema_mistake(document.get("schema"), SCHEMA)
    if message:
        raise UsageError(f"--judge {file}: $.schema: {message}")
    reader = Reader(document)
    reader.raw("schema")
    spec = _spec(reader, hashlib.sha256(content).hexdigest(), str(file))
    if reader.mistakes or spec is None:
        raise UsageError("\n".join(f"--judge {file}: {mistake}" for mistake in reader.mistakes))
    return spec


def _spec(reader: Reader, digest: str, where: str) -> JudgeSpec | None:
    name, template = reader.take("name", str), _template(reader)
    engine = reader.choice("engine", registry.engine_names())
    model, mode = reader.take("model", str, None), reader.take("mode", str, None)
    chat = reader.take("chat", bool, False)
    parse = _parse(reader.child("parse", required=True))
    default = CHOICE_TOKENS if parse is not None and parse.choices else PATTERN_TOKENS
    max_tokens = reader.natural("max_tokens", default, 1)
    settings = _settings(reader.child("settings"))
    reader.close()
    if reader.mistakes or name is None or template is None or engine is None or parse is None:
        return None
    adapter = registry.adapter(engine)
    asked = {**(mode_settings(adapter, mode, f"--judge {where}: $.mode") if mode is not None else {}), **settings}
    return JudgeSpec(
        name=name, adapter=adapter, model=model or default_model(engine), asked=asked,
        settings=resolve(adapter, [(f"--judge {where}: $.settings", asked)]), template=template, chat=chat is True,
        max_tokens=max_tokens, parse=parse, digest=digest,
    )  # fmt: skip


def _template(reader: Reader) -> str | None:
    template = reader.take("template", str)
    if template is None:
        return None
    found = PLACEHOLDER.findall(template)
    for name in sorted(set(found) - set(PLACEHOLDERS)):
        reader.mistake("template", f"unknown placeholder {{{name}}}; there are {', '.join(PLACEHOLDERS)}")
    if "output" not in found:
        reader.mistake("template", "{output} is missing; without it the judge does not see the answer")
    return template


def _parse(reader: Reader) -> Parse | None:
    choices, points = reader.strings("choices"), reader.strings("points")
    pattern = reader.take("pattern", str, "") or ""
    reader.close()
    if bool(choices) == bool(pattern):
        reader.mistake("", "expected either choices or pattern")
    if not points:
        reader.mistake("points", "expected at least one reading that earns the point")
    if choices and (strange := sorted(set(points) - set(choices))):
        reader.mistake("points", f"{strange[0]!r} is not one of the choices {', '.join(map(repr, choices))}")
    if choices and (len(set(choices)) < 2 or not all(choices)):
        reader.mistake("choices", "expected at least two different texts that are not empty")
    try:
        re.compile(pattern)
    except re.error as error:
        reader.mistake("pattern", f"no regular expression: {error}")
    return None if reader.mistakes else Parse(choices=choices, pattern=pattern, points=points)


def _settings(reader: Reader) -> dict[str, Scalar]:
    found: dict[str, Scalar] = {}
    for name in sorted(reader.table):
        value = reader.raw(name)
        if isinstance(value, str | int | float | bool):
            found[name] = value
        else:
            reader.mistake(name, f"expected a string, number or boolean, got {shown(value)}")
    return found


def _typed(value: Scalar) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
