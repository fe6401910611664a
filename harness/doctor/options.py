"""Command-line options by snake_case name. It knows how options are written, not what they mean."""

from __future__ import annotations

import re
from collections.abc import Sequence

from harness.doctor.facts import Option
from harness.doctor.finding import Place
from harness.doctor.process import known_text

_ALIASES = {
    "tp": "tensor_parallel_size",
    "tp_size": "tensor_parallel_size",
    "model_path": "model",
    "q": "quantization",
    "O": "optimization_level",
    "asc": "api_server_count",
}


_BARE = re.compile(r"(enable|disable|no|trust|skip|enforce|return|log|allow|use|async)_")


def read_options(words: Sequence[str], place: Place) -> tuple[dict[str, Option], list[str]]:
    """Options by snake_case name, and the loose words. A flag without a value reads "true"."""
    options: dict[str, Option] = {}
    loose: list[str] = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        match = re.match(r"--?([A-Za-z][\w.-]*)(?:=(.*))?$", word, re.DOTALL)
        if not match:
            loose.append(word)
            continue
        raw, value = match[1], match[2]
        if value is None and re.fullmatch(r"O\d", raw):
            raw, value = "O", raw[1]
        name = raw.replace("-", "_")
        name = _ALIASES.get(name, name)
        if value is None and rest and not _looks_like_option(rest[0]) and not _BARE.match(name):
            value = rest.pop(0)
        options[name] = Option(value="true" if value is None else known_text(value), place=place)
    return options, loose


def _looks_like_option(word: str) -> bool:
    return bool(re.match(r"--?[A-Za-z]", word))
