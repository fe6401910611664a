"""Fingerprint fields of a model's files: weights, configuration, tokenizer, chat template, generation defaults.

It does not load a model. Rules: weights are every weight file's bytes, streamed and remembered; a file that is not
there is *not applicable*, since a model may do without; names are relative, so that moving a model changes nothing.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

from harness.engine import Field
from harness.fingerprint.file_digests import FileDigests
from harness.fingerprint.reading import NOT_APPLICABLE, Unknown, read_field

WEIGHTS = (".safetensors", ".gguf", ".bin", ".pt", ".pth")
NO_WEIGHTS = ("training_args.bin", "optimizer.pt", "scheduler.pt")
TOKENIZER = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json",
             "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt")  # fmt: skip
TEMPLATES = ("chat_template.jinja", "chat_template.json")


def model_fields(model: Path, digests: FileDigests | None = None) -> tuple[Field, ...]:
    """The fields of a model folder or a single weight file. `digests` remembers; its `recheck` reads every byte."""
    known = digests or FileDigests()
    fields = (
        read_field("model.weights", "identity", "bytes of every weight file", lambda: _weights(model, known)),
        read_field("model.config", "identity", "config.json", _one(model, known, "config.json")),
        read_field("model.generation_config", "identity", "generation_config.json",
                   _one(model, known, "generation_config.json")),
        read_field("model.tokenizer", "identity", "tokenizer files", lambda: _some(model, known, TOKENIZER)),
        read_field("model.chat_template", "identity", "chat template", lambda: _template(model)),
    )  # fmt: skip
    known.save()
    return fields


def _weights(model: Path, digests: FileDigests) -> str:
    if model.is_file():
        return digests.of_all([("weights", model)])
    files = [path for path in sorted(model.rglob("*")) if path.suffix in WEIGHTS and path.name not in NO_WEIGHTS]
    if not files:
        raise Unknown(f"no file ends in {', '.join(WEIGHTS)}")
    return digests.of_all((path.relative_to(model).as_posix(), path) for path in files)


def _one(model: Path, digests: FileDigests, name: str) -> Callable[[], str]:
    return lambda: _some(model, digests, (name,))


def _some(model: Path, digests: FileDigests, names: tuple[str, ...]) -> str:
    present = [(name, model / name) for name in names if model.is_dir() and (model / name).is_file()]
    return digests.of_all(present) if present else NOT_APPLICABLE


def _template(model: Path) -> str:
    """The template's text, from its own file or from the tokenizer's configuration."""
    if not model.is_dir():
        return NOT_APPLICABLE
    for name in TEMPLATES:
        if (model / name).is_file():
            return _digest((model / name).read_text(encoding="utf-8"))
    config = model / "tokenizer_config.json"
    template = json.loads(config.read_text(encoding="utf-8")).get("chat_template") if config.is_file() else None
    return NOT_APPLICABLE if template is None else _digest(json.dumps(template, sort_keys=True))


def _digest(text: str) -> str:
    return "sha256:" + hashlib.sha256(text.encode()).hexdigest()
