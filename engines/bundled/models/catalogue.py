"""Model names and paths to sources: what `samebits models` lists and `--model` accepts. It reads no weights."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import NamedTuple

from engines.bundled.errors import ModelError
from engines.bundled.gpu.driver import count_devices
from engines.bundled.gpu.interface import GpuError
from engines.bundled.models import random_8b, smollm2, tiny
from engines.bundled.models.source import Source
from engines.bundled.vision import tiny_vit

FOLDER = "FOLDER"
FOLDER_DESCRIPTION = "a Hugging Face folder: config.json of Llama, Mistral, Qwen2, Qwen3 or Qwen3-MoE, *.safetensors"
GGUF = "FILE.gguf"
GGUF_DESCRIPTION = "a GGUF file of architecture llama, qwen2, qwen3 or qwen3moe"


class Listing(NamedTuple):
    """One line of the list of models."""

    name: str
    description: str
    available: bool
    how_to_get: str


def list_models() -> tuple[Listing, ...]:
    """Every kind of model, the default first."""
    here = smollm2.gguf_path().is_file()
    return (
        Listing(smollm2.NAME, smollm2.DESCRIPTION, here, smollm2.FETCH),
        Listing(tiny.NAME, tiny.DESCRIPTION, True, "always here"),
        Listing(tiny.MOE_NAME, tiny.MOE_DESCRIPTION, True, "always here"),
        Listing(random_8b.NAME, random_8b.DESCRIPTION, _has_card(), random_8b.NEEDS),
        Listing(tiny_vit.NAME, tiny_vit.DESCRIPTION, True, "always here"),
        Listing(FOLDER, FOLDER_DESCRIPTION, True, "give its path"),
        Listing(GGUF, GGUF_DESCRIPTION, True, "give its path"),
    )


def _has_card() -> bool:
    try:
        return count_devices() > 0
    except GpuError:
        return False


def open_source(model: str) -> Source:
    """The source of a model by name or path. Raises ModelError for what is unknown or missing."""
    if model == tiny.NAME:
        return tiny.TinySource()
    if model == tiny.MOE_NAME:
        return tiny.TinySource(tiny.MOE_NAME, tiny.MOE_CONFIG)
    if model == random_8b.NAME:
        return random_8b.SeededSource()
    if model == smollm2.NAME:
        return smollm2.open_smollm2()
    if model == tiny_vit.NAME:
        raise ModelError(f"model {model!r}: it encodes images and has no text; it serves component cells alone")
    return _open_path(model)


def _open_path(model: str) -> Source:
    path = Path(model).expanduser()
    if path.suffix == ".gguf":
        from engines.bundled.models.convert import open_gguf

        return open_gguf(path, path.stem)
    if path.is_dir():
        from engines.bundled.models.folder import FolderSource

        return FolderSource(path, path.resolve().name)
    names = (tiny.NAME, tiny.MOE_NAME, smollm2.NAME, random_8b.NAME)
    near = difflib.get_close_matches(model, names, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    known = ", ".join(map(repr, names))
    raise ModelError(f"model {model!r}: expected {known}, a {FOLDER} or a {GGUF}; there is none of that name{hint}")
