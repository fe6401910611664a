"""An endpoint as the harness sees it before anything is sent: settings, modes, axes, and what they rule out.

It does not know interfaces' fields or how a server is started. Rules: nothing is sent before the engine process
starts; a schedule over HTTP is tied to what streams show, not to engine steps; what only the server can vary
is offered only where the server is ours.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from engines.http.options import AS_STARTED, NOT_FORCED, SERVER_MODES, SETTINGS, TEXT_MODEL, find_problem
from engines.offline_checks import NEEDS_PATH
from harness.engine import AxisSupport, Engine, ModelFacts, ModelInfo, Replay, Rule, Scalar, Setting, Tokenizer

_ATTACHED = "the server is attached to, so it cannot be restarted from here; leave out url to have one started"
_AXES: dict[str, AxisSupport] = {
    "arrivals": AxisSupport(),
    "batch": AxisSupport(),
    "companions": AxisSupport(),
    "load": AxisSupport(),
    "order": AxisSupport(),
    "replica": AxisSupport(fields=("config.replica", "resolved.replica")),
    "restart": AxisSupport(),
    "scoring": AxisSupport(fields=("config.scoring", "resolved.scoring")),
    "server_history": AxisSupport(),
}
_TEXT_CONTEXT = 1 << 20  # bytes; the server is the one to refuse


class EndpointAdapter:
    """The adapter named "endpoint"."""

    name = "endpoint"

    def settings(self) -> tuple[Setting, ...]:
        """Every option `--set` accepts."""
        return SETTINGS

    def modes(self) -> Mapping[str, Mapping[str, Scalar]]:
        """Modes of a managed server; an attached one runs as it was started."""
        return {name: {"server_mode": name} for name in SERVER_MODES if name != AS_STARTED}

    def axes(self) -> Mapping[str, AxisSupport]:
        """What can be varied from outside a server."""
        return _AXES

    def strongest_rule(self) -> Rule:
        """No interface gives logits; what a server really gives is asked when the engine process starts."""
        return "topk"

    def refuses(self, axis: str, replay: Replay, configuration: Mapping[str, Scalar]) -> str | None:
        """Why a cell cannot be run with these settings, or None."""
        values = {setting.name: setting.default for setting in SETTINGS} | dict(configuration)
        if axis == "scoring":
            values |= {"scoring": "prefill"}
            if replay != "golden":
                return NEEDS_PATH
        if replay == "golden" and values["scoring"] != "prefill":
            return NOT_FORCED
        if axis == "restart" and values["url"]:
            return _ATTACHED
        if axis == "replica" and values["url"] and not values["second_url"]:
            return "the second server has no address; set second_url"
        return find_problem(values)

    def models(self) -> tuple[ModelInfo, ...]:
        """Models whose tokenizer is at hand, and none at all."""
        from engines.bundled_adapter import BundledAdapter

        text = ModelInfo(
            name=TEXT_MODEL, description="no tokenizer: prompts go out as text or messages", available=True,
            how_to_get="always here",
        )  # fmt: skip
        return (*BundledAdapter().models(), text)

    def model_facts(self, model: str) -> ModelFacts:
        """Vocabulary and context of the tokenizer's model. Raises ModelError."""
        from engines.bundled_adapter import BundledAdapter

        if model == TEXT_MODEL:
            return ModelFacts(name=model, vocab_size=256, max_position_embeddings=_TEXT_CONTEXT)
        return BundledAdapter().model_facts(model)

    def tokenizer(self, model: str) -> Tokenizer:
        """The tokenizer prompts are encoded with before they are sent. Raises ModelError."""
        from engines.bundled_adapter import BundledAdapter

        return Bytes() if model == TEXT_MODEL else BundledAdapter().tokenizer(model)

    def environment(self, configuration: Mapping[str, Scalar]) -> Mapping[str, str]:  # noqa: ARG002 - the same for all
        """The client needs nothing; a managed server's own variables are given to it alone."""
        return {"PYTHONHASHSEED": "0"}

    def start(self, model: str, configuration: Mapping[str, Scalar]) -> Engine:
        """Starts or attaches to the server, and asks what it offers. Raises EngineError, Unsupported."""
        from engines.http.lifetime import open_endpoint
        from engines.http.options import read_options

        return open_endpoint(model, read_options(configuration), self.tokenizer(model))


class Bytes:
    """UTF-8 bytes as stand-ins for ids nobody knows: prompts are sent as text, and only their length is used."""

    @property
    def digest(self) -> str:
        """The definition in words; there is nothing else to digest."""
        return "samebits: UTF-8 bytes of the text, of messages one line each"

    @property
    def vocab_size(self) -> int:
        """Ids are below this."""
        return 256

    def encode(self, text: str) -> tuple[int, ...]:
        """The text's bytes."""
        return tuple(text.encode())

    def decode(self, ids: Sequence[int]) -> str:
        """Text of bytes."""
        return bytes(ids).decode(errors="replace")

    def encode_chat(self, messages: Sequence[tuple[str, str]]) -> tuple[int, ...]:
        """Bytes of `role: content` lines."""
        return self.encode("".join(f"{role}: {content}\n" for role, content in messages))
