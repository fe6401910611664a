"""SmolLM2's tokenizer by name alone, for models whose ids mean nothing: shipped corpora keep their frozen ids.

It holds no vocabulary. Rules: it never makes ids; whoever needs text encoded is told what to fetch; ids are shown as
numbers, since random weights give them no meaning.
"""

from __future__ import annotations

from collections.abc import Sequence

from harness.errors import ModelError

SMOLLM2_DIGEST = "7c645d6a98c75e893e0247759430412afb0755d6a08aca5e0173c213bb0c8bc9"
SMOLLM2_VOCABULARY = 49152


class FrozenIds:
    """Implements `harness.engine.Tokenizer` for corpora that were frozen with SmolLM2's tokenizer."""

    digest = SMOLLM2_DIGEST
    vocab_size = SMOLLM2_VOCABULARY

    def encode(self, text: str) -> tuple[int, ...]:
        """Raises ModelError: there is no vocabulary here."""
        raise self._refusal(repr(text[:40]))

    def decode(self, ids: Sequence[int]) -> str:
        """The ids themselves."""
        return "".join(f"<{token}>" for token in ids)

    def encode_chat(self, messages: Sequence[tuple[str, str]]) -> tuple[int, ...]:
        """Raises ModelError: there is no vocabulary here."""
        raise self._refusal(f"{len(messages)} messages")

    @staticmethod
    def _refusal(what: str) -> ModelError:
        from engines.bundled.models import smollm2

        return ModelError(f"{what}: cannot be tokenised without SmolLM2's files; get them with `{smollm2.FETCH}`, or "
                          "use a corpus that was frozen with its tokenizer")  # fmt: skip
