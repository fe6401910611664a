"""Where a model comes from: anything that can tell its shape, its tokenizer and its weights. It reads nothing
itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from engines.bundled.config import Model, ModelConfig
from engines.bundled.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """What the stored form of a model was, before it became float32."""

    kind: str  # "memory" | "folder" | "gguf"
    quantisation: str  # tensor types of the source, for example "F32+Q4_1+Q8_0"; "none" if there was no file


class Source(Protocol):
    """One model. Each call reads what it needs and no more; all raise ModelError."""

    def config(self) -> ModelConfig:
        """Its shape, from metadata alone."""

    def tokenizer(self) -> Tokenizer:
        """Its tokenizer."""

    def model(self) -> Model:
        """Its weights in float32, mapped from disk where the file holds float32."""

    def origin(self) -> Origin:
        """What it was stored as."""
