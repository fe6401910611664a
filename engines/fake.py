"""The fake engine: a scripted stand-in with faults on request. It tests the harness, and it is no language model.

It does not know cells or verdicts. Rules: with `invariant` its results depend on the request alone, without it on the
company each request ran in, so that controls fire; steps and counters are honest unless the named fault is a lie; the
tokenizer is bytes. Sampling follows the order of docs/numerics.md, with a draw of its own in place of Philox.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

from engines.fake_names import CONTEXT, EOS, FAULTS, VOCAB
from harness.engine import AxisSupport, Engine, ModelFacts, ModelInfo, Rule, Scalar, Setting, Tokenizer
from harness.errors import ModelError

MODEL = "fake"

_SETTINGS = (
    Setting(name="fault", default="none", choices=tuple(FAULTS), meaning="what the engine does wrong on purpose"),
    Setting(name="fault_position", default=0, minimum=-1, meaning="where the fault acts; -1 is the last position"),
    Setting(name="fault_request", default="", meaning="where the fault acts; empty is the first judged request"),
    Setting(
        name="fault_when",
        default="always",
        choices=("always", "batched"),
        meaning="batched: only in works whose requests run beside each other, so that one arm alone is wrong",
    ),
    Setting(name="invariant", default=True, meaning="results depend on the request alone, not on its company"),
    Setting(name="max_num_batched_tokens", default=512, minimum=1, meaning="tokens in one step"),
    Setting(name="max_num_seqs", default=8, minimum=1, meaning="sequences in one step"),
    Setting(name="threads", default=1, minimum=1, meaning="moves results where invariant is off"),
    Setting(
        name="timer_us",
        default=0,
        minimum=0,
        meaning="microseconds a computed token takes on a scripted clock when serving by the clock; 0: the real clock",
    ),
    Setting(name="tuning", default=0, minimum=0, meaning="moves results where invariant is off"),
)
_AXES = {
    "arrivals": AxisSupport(),
    "batch": AxisSupport(),
    "companions": AxisSupport(),
    "load": AxisSupport(),
    "compiler": AxisSupport(unsupported="the fake engine compiles nothing"),
    "isa": AxisSupport(unsupported="the fake engine has no kernels"),
    "max_num_batched_tokens": AxisSupport(fields=("config.max_num_batched_tokens", "resolved.max_num_batched_tokens")),
    "max_num_seqs": AxisSupport(fields=("config.max_num_seqs", "resolved.max_num_seqs")),
    "order": AxisSupport(),
    "page_size": AxisSupport(unsupported="the fake engine has no KV cache"),
    "restart": AxisSupport(fields=("config.tuning", "resolved.tuning")),
    "threads": AxisSupport(fields=("config.threads", "resolved.threads", "env.OMP_NUM_THREADS")),
}


class FakeAdapter:
    """The adapter named "fake"."""

    name = "fake"

    def settings(self) -> tuple[Setting, ...]:
        """Every option `--set` accepts."""
        return _SETTINGS

    def modes(self) -> Mapping[str, Mapping[str, Scalar]]:
        """deterministic: results depend on the request alone; ordinary and free: on its company too."""
        return {
            "deterministic": {"invariant": True},
            "free": {"invariant": False},
            "ordinary": {"invariant": False},
        }

    def axes(self) -> Mapping[str, AxisSupport]:
        """What can be varied, and why the rest cannot."""
        return _AXES

    def strongest_rule(self) -> Rule:
        """Logits can be digested."""
        return "tensors"

    def models(self) -> tuple[ModelInfo, ...]:
        """The one hash."""
        return (
            ModelInfo(
                name=MODEL,
                description=f"hashed logits over {VOCAB} tokens; no language, for tests of the harness",
                available=True,
                how_to_get="always here",
            ),
        )

    def model_facts(self, model: str) -> ModelFacts:
        """Raises ModelError for any other name."""
        _check_model(model)
        return ModelFacts(name=MODEL, vocab_size=VOCAB, max_position_embeddings=CONTEXT)

    def tokenizer(self, model: str) -> Tokenizer:
        """Bytes. Raises ModelError for any other name."""
        _check_model(model)
        return ByteTokenizer()

    def environment(self, configuration: Mapping[str, Scalar]) -> Mapping[str, str]:
        """NumPy's threads as configured."""
        return {"OMP_NUM_THREADS": str(configuration.get("threads", 1)), "PYTHONHASHSEED": "0"}

    def start(self, model: str, configuration: Mapping[str, Scalar]) -> Engine:
        """Starts at once. Raises ModelError; EngineError for an unknown setting."""
        from engines.fake_lifetime import FakeLifetime

        _check_model(model)
        return FakeLifetime({setting.name: setting.default for setting in _SETTINGS}, configuration)


class ByteTokenizer:
    """UTF-8 bytes as token ids."""

    @property
    def digest(self) -> str:
        """SHA-256 of the definition in words."""
        return hashlib.sha256(f"UTF-8 bytes, end of text {EOS}; chat: <role>content newline".encode()).hexdigest()

    @property
    def vocab_size(self) -> int:
        """Ids are below this."""
        return VOCAB

    def encode(self, text: str) -> tuple[int, ...]:
        """The text's bytes."""
        return tuple(text.encode())

    def decode(self, ids: Sequence[int]) -> str:
        """Text of bytes; the end of the text decodes to nothing."""
        return bytes(token for token in ids if token != EOS).decode(errors="replace")

    def encode_chat(self, messages: Sequence[tuple[str, str]]) -> tuple[int, ...]:
        """One line per message, then an open line of the assistant's."""
        lines = "".join(f"<{role}>{content}\n" for role, content in messages)
        return self.encode(f"{lines}<assistant>")


def _check_model(model: str) -> None:
    if model != MODEL:
        raise ModelError(f"engine 'fake': model {model!r}: expected {MODEL!r}, the only one it has")
