"""The seam between the harness and engines: a light `Adapter` in our process, an `Engine` in a child process.

It does not know any engine. Rules: an adapter answers without importing torch or the engine; an engine reports
requested, resolved and observed separately and never infers one from another; anything it cannot do it refuses with
`Unsupported` and the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol, runtime_checkable

from harness.request import Request
from harness.schedule import Schedule

TYPE_CHECKING = False
if TYPE_CHECKING:  # numpy stays out of the command line's import
    from harness.traces import Traces

Scalar = str | int | float | bool
Replay = Literal["natural", "golden"]
FieldClass = Literal["identity", "lineage", "context"]
Rule = Literal["text", "tokens", "logprobs", "topk", "tensors"]
RULES: tuple[Rule, ...] = ("text", "tokens", "logprobs", "topk", "tensors")  # weakest to strongest


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One engine option. `choices` empty means any value of the default's type; `minimum` bounds numbers."""

    name: str
    default: Scalar
    meaning: str
    choices: tuple[Scalar, ...] = ()
    minimum: int | float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisSupport:
    """How an engine varies an axis: the fingerprint fields that move with it, derived ones included.

    `unsupported` is the reason when it cannot; the fields are then empty. `resets` says that the engine implements
    `ResetsCache`: the cases of a cache axis may then share a process, each after a reset.
    """

    fields: tuple[str, ...] = ()
    unsupported: str | None = None
    resets: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """One line of `samebits models`: what it is, whether it is here, and how to get it."""

    name: str
    description: str
    available: bool
    how_to_get: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """What planning needs to know of a model without loading it."""

    name: str
    vocab_size: int
    max_position_embeddings: int  # tokens: prompt + output must fit


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """One fingerprint field. `value` None means unknown, and `source` then says why; else where it was read.

    The value "not applicable" is a value like any other and equals itself.
    """

    name: str
    value: Scalar | None
    field_class: FieldClass
    source: str


class Tokenizer(Protocol):
    """Text to token ids for one model."""

    @property
    def digest(self) -> str:
        """SHA-256 over everything that decides the ids: vocabulary, merges, special tokens, chat template."""

    @property
    def vocab_size(self) -> int:
        """Ids are below this."""

    def encode(self, text: str) -> tuple[int, ...]:
        """Token ids of plain text; no special tokens are added."""

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids; bytes that are no UTF-8 become U+FFFD."""

    def encode_chat(self, messages: Sequence[tuple[str, str]]) -> tuple[int, ...]:
        """Token ids of (role, content) messages in the model's chat template, with the assistant's turn opened."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """One case as an engine sees it. `golden` maps a request id to the tokens it is forced along."""

    requests: tuple[Request, ...]  # judged requests and companions, any order
    schedule: Schedule
    replay: Replay
    golden: Mapping[str, tuple[int, ...]]
    logits_digests: bool  # rule `tensors`


Progress = Callable[[int, int], None]  # (requests finished, tokens generated) so far


class Engine(Protocol):
    """A started engine. One lifetime, one configuration, several works one after another."""

    def resolved(self) -> Mapping[str, Scalar]:
        """The configuration the engine settled on (page count, ISA, ...), by its own account."""

    def observed(self) -> Mapping[str, Scalar]:
        """What is read from inside now: threads in use, kernel variant, counters' totals."""

    def fingerprint(self) -> tuple[Field, ...]:
        """The subject's fingerprint fields that only the engine can know."""

    def generate(self, work: Work, progress: Progress) -> Traces:
        """Runs one case to its end.

        Raises:
            EngineError: NaN logits, a lost request, an impossible schedule; the message names the request.
            Unsupported: a feature this engine does not have.
        """

    def stop(self) -> None:
        """Frees what it holds; called once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Emission:
    """Tokens that came out for one sample of a request, at a time of the engine's clock."""

    request: str
    sample: int
    tokens: int  # new ones; 0 where only the end was told
    finished: bool  # nothing more comes for this sample
    at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """What an engine takes; None: it cannot say. Peaks are since its start, all of its processes together."""

    peak_memory_bytes: int | None
    peak_device_bytes: int | None
    kv_capacity_tokens: int | None  # tokens whose keys and values fit at once


class TimedSession(Protocol):
    """One timed serving: requests come when the caller's clock says so, and everything leaves with a time.

    The caller owns arrivals; an engine that computes in the caller's thread runs one step per `advance`, one that
    serves from elsewhere hands over what has arrived meanwhile.
    """

    def now(self) -> float:
        """Seconds of the clock of all times here; monotonic."""

    def submit(self, request: str) -> None:
        """Hands over one of the opened requests; called once for each. Raises EngineError."""

    def advance(self, until_s: float | None) -> Sequence[Emission]:
        """Works until something came out, a step ended, or `until_s` is reached; None: no other arrival is near.

        With nothing to do it waits for `until_s`. Raises EngineError: a lost request, a server that went away.
        """

    def finish(self) -> Traces:
        """The traces of everything submitted, in the order of submission; the session is over."""


@runtime_checkable
class Timed(Protocol):
    """An engine that can serve by the clock; what `samebits cost` needs beyond `Engine`."""

    def open_timed(self, requests: Sequence[Request]) -> TimedSession:
        """Prepares to serve these requests, each at most once. Raises EngineError, Unsupported."""

    def footprint(self) -> Footprint:
        """Memory and KV capacity as of now."""


@runtime_checkable
class KeepsCache(Protocol):
    """An engine whose prefix cache outlives its process; asked only where the axis `cache_restore` is offered."""

    def save_cache(self, folder: Path) -> None:
        """Writes the prefix cache whole or not at all. Raises EngineError."""

    def restore_cache(self, folder: Path) -> None:
        """Fills the empty prefix cache. Raises EngineError, naming what differs, for a store of another origin."""


@runtime_checkable
class RefusesByConfiguration(Protocol):
    """An adapter whose offers follow its settings: an endpoint that is attached to cannot be restarted."""

    def refuses(self, axis: str, replay: Replay, configuration: Mapping[str, Scalar]) -> str | None:
        """Why a cell cannot be run with these settings, or None; asked while planning, so it starts nothing."""


@runtime_checkable
class ResetsCache(Protocol):
    """An engine that can empty its prefix cache and say that it is empty; asked only where `AxisSupport.resets`."""

    def reset_cache(self) -> None:
        """Empties the prefix cache. Raises EngineError when anything is left in it."""


@runtime_checkable
class NamesItsCaches(Protocol):
    """An engine that says which autotune and compile caches can decide what it computes; without it, all of them."""

    def deciding_caches(self) -> frozenset[str]:
        """Names of `cache.*` fields. The others are recorded as lineage: shown, and no identity of this engine."""


class Adapter(Protocol):
    """What the harness may ask of an engine without starting it. Implementations import nothing heavy."""

    name: str

    def settings(self) -> tuple[Setting, ...]:
        """Every option `--set` accepts, with explicit defaults for this machine."""

    def modes(self) -> Mapping[str, Mapping[str, Scalar]]:
        """Mode name to the settings it stands for."""

    def axes(self) -> Mapping[str, AxisSupport]:
        """Axis name (of `harness.axis`) to how it is varied here."""

    def strongest_rule(self) -> Rule:
        """The strongest rule this engine's evidence can be judged under."""

    def models(self) -> tuple[ModelInfo, ...]:
        """What `samebits models` lists for this engine."""

    def model_facts(self, model: str) -> ModelFacts:
        """Raises ModelError when the model is missing (with how to get it) or unsupported."""

    def tokenizer(self, model: str) -> Tokenizer:
        """The model's tokenizer. Raises ModelError."""

    def environment(self, configuration: Mapping[str, Scalar]) -> Mapping[str, str]:
        """Variables the child process must carry before anything is imported."""

    def start(self, model: str, configuration: Mapping[str, Scalar]) -> Engine:
        """Starts the engine; called in the child process only. Raises EngineError, ModelError, Unsupported."""
