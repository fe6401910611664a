"""Compile and autotune caches of a vLLM process: empty ones that go with it, what they held at the start.

Rules: a fresh lifetime starts from empty caches; what vLLM remembers about its own model classes (which of its features
a class has, found out by a second process that imports everything) decides nothing that is computed, and is kept.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from pathlib import Path

from engines.vllm_config import CACHE_VARIABLES
from harness.fingerprint.file_digests import FileDigests
from harness.fingerprint.kernel_caches import cache_fields

DESCRIPTIONS = "modelinfos"  # vLLM's folder of JSON files, each checked against the digest of the class's source


def fresh_caches() -> tuple[Path, ...]:
    """Points every compile and autotune cache of this process at an empty folder that goes with it."""
    base = Path(tempfile.mkdtemp(prefix="samebits-vllm-"))
    for variable in CACHE_VARIABLES:
        os.environ[variable] = str(base / variable.lower())
    return (base,)


def caches_digest() -> str:
    """What the caches hold: "empty", or their digests."""
    home = Path(os.environ["HOME"]) if os.environ.get("HOME") else None
    held = {entry.name: str(entry.value) for entry in cache_fields(os.environ, home, FileDigests())}
    if set(held.values()) == {"empty"}:
        return "empty"
    return " ".join(f"{name.removeprefix('cache.')}={value}" for name, value in sorted(held.items()))


def recall_descriptions() -> None:
    """Gives vLLM the descriptions of its model classes that an earlier lifetime left."""
    _copy(_kept(), Path(os.environ["VLLM_CACHE_ROOT"]) / DESCRIPTIONS)


def keep_descriptions() -> None:
    """Keeps the descriptions that vLLM has made for the next lifetime."""
    _copy(Path(os.environ["VLLM_CACHE_ROOT"]) / DESCRIPTIONS, _kept())


def _kept() -> Path:
    from engines.bundled.models.cache import cache_folder

    return cache_folder() / "vllm" / DESCRIPTIONS


def _copy(source: Path, target: Path) -> None:
    """Copies files that the target lacks or has with other bytes. A folder that cannot be written costs seconds."""
    with contextlib.suppress(OSError):
        target.mkdir(parents=True, exist_ok=True)
        for file in sorted(source.glob("*.json")):
            there = target / file.name
            if there.is_file() and there.read_bytes() == file.read_bytes():
                continue
            draft = there.with_suffix(f".{os.getpid()}.part")
            shutil.copyfile(file, draft)
            draft.replace(there)
