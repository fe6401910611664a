"""A bundled tokenizer under the harness's protocol: the same answers, the harness's errors."""

from __future__ import annotations

from collections.abc import Sequence

from engines.bundled.tokenizer import Tokenizer
from engines.bundled_adapter import harness_errors


class HarnessTokenizer:
    """Implements `harness.engine.Tokenizer`."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Wraps a tokenizer of the bundled engine."""
        self._tokenizer = tokenizer

    @property
    def digest(self) -> str:
        """SHA-256 over everything that decides the ids."""
        return self._tokenizer.digest

    @property
    def vocab_size(self) -> int:
        """Ids are below this."""
        return self._tokenizer.vocab_size

    def encode(self, text: str) -> tuple[int, ...]:
        """Token ids of plain text."""
        return self._tokenizer.encode(text)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids."""
        return self._tokenizer.decode(ids)

    def encode_chat(self, messages: Sequence[tuple[str, str]]) -> tuple[int, ...]:
        """Token ids of messages. Raises ModelError if the template refuses them."""
        with harness_errors():
            return self._tokenizer.encode_chat(messages)
