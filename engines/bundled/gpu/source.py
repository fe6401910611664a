"""The kernels' source text: which files, in which order, with which constants. It compiles nothing.

Rules: what is compiled is this text and these constants and nothing else, so its digest names the kernels.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from engines.bundled.gpu.interface import Shape

FOLDER = Path(__file__).with_name("kernels")
FILES = (
    "machine.cu", "functions.cu", "rows.cu", "linear.cu", "attention.cu", "experts.cu", "decode.cu", "resident.cu",
    "resident_rows.cu", "ranks.cu",
)  # fmt: skip
EMULATION = FOLDER / "emulation.h"


def read_source() -> str:
    """All files as one, each under a line mark, so that messages name file and line."""
    return "".join(f'#line 1 "{name}"\n{(FOLDER / name).read_text()}' for name in FILES)


def define_flags(shape: Shape) -> tuple[str, ...]:
    """The shape as -D flags."""
    return tuple(f"-D{name}={value}" for name, value in sorted(shape.defines().items()))


def digest(*parts: str) -> str:
    """SHA-256 over parts."""
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()
