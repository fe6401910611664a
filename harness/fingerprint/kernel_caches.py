"""Fingerprint fields of autotune and compile caches: what was tuned or compiled before decides which kernel runs.

It does not know the caches' formats. Rules: contents are digested by relative name and bytes, locks and temporary files
left out; a cache that is not there is *empty*, which is a value; places follow each tool's own variables.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from harness.engine import Field
from harness.fingerprint.file_digests import FileDigests
from harness.fingerprint.reading import Unknown, read_field

EMPTY = "empty"
MOST_FILES = 20_000
_PASSING = re.compile(r"\.(lock|tmp|part|pid)$|(^|/)(tmp|\.)[^/]*$|(^|/)tmp\.pid_")  # the last: Triton's folders


class Cache(NamedTuple):
    """One cache: the field, the variable that moves it, and its place in the home folder."""

    field: str
    variable: str
    home: str
    reason: str


CACHES = (
    Cache("cache.triton", "TRITON_CACHE_DIR", ".triton/cache", "autotuned tile sizes and compiled kernels"),
    Cache(
        "cache.inductor", "TORCHINDUCTOR_CACHE_DIR", ".cache/torch/inductor", "compiled graphs and autotuned choices"
    ),
    Cache("cache.vllm", "VLLM_CACHE_ROOT", ".cache/vllm", "compiled graphs"),
    Cache(
        "cache.flashinfer", "FLASHINFER_WORKSPACE_BASE", ".cache/flashinfer", "compiled and autotuned attention kernels"
    ),
    Cache("cache.deep_gemm", "DG_JIT_CACHE_DIR", ".deep_gemm", "compiled matrix kernels"),
)


def cache_fields(environ: Mapping[str, str], home: Path | None, digests: FileDigests) -> tuple[Field, ...]:
    """One identity field per cache. `home` None: there is no home folder."""
    fields = tuple(
        read_field(cache.field, "identity", f"contents; {cache.reason}", _reader(cache, environ, home, digests))
        for cache in CACHES
    )
    digests.save()
    return fields


def _reader(cache: Cache, environ: Mapping[str, str], home: Path | None, digests: FileDigests) -> Callable[[], str]:
    def read() -> str:
        named = environ.get(cache.variable)
        if named is None and home is None:
            raise Unknown(f"{cache.variable} is not set and there is no home folder")
        folder = Path(named).expanduser() if named else (home or Path()) / cache.home
        if not folder.is_dir():
            return EMPTY
        paths = sorted(Path(place) / name for place, _, names in os.walk(folder) for name in names)
        files = [(path.relative_to(folder).as_posix(), path) for path in paths if path.is_file()]
        kept = [(name, path) for name, path in files if not _PASSING.search(name)]
        if len(kept) > MOST_FILES:
            raise Unknown(f"it holds {len(kept)} files, more than {MOST_FILES}")
        return digests.of_all(kept) if kept else EMPTY

    return read
