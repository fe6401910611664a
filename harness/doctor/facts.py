"""What the readers see in one file: settings, starts, requests, images. Facts only, no judgement.

A value of None is "not known from the text" (computed, templated, read from elsewhere) and is never taken for absent.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from harness.doctor.finding import Place

MAX_STARTS = 500  # in one file; what lies beyond was not written by a person
MAX_SETTINGS = 5_000
MAX_REQUESTS = 50_000

Reach = Literal["", "container", "unit", "replaced"]  # why nothing outside the start's own file reaches it


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvSet:
    """One environment variable set (or unset) at one place."""

    name: str
    value: str | None
    place: Place
    unset: bool = False
    overridable: str = ""  # how something else can win: "setdefault", "${NAME:-1}"
    guard: str = ""  # the accelerator test that silently skips this line
    late: str = ""  # what had already read the variable
    scope: str = ""  # "" is the file; else a service, container, build stage or function
    branch: tuple[str, ...] = ()  # the arms of conditions this line stands in, outermost first


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocked:
    """A setting that does not reach the process: where it is lost and why."""

    setting: EnvSet
    place: Place
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """A command-line option or keyword argument; "true" for a bare flag, None when computed."""

    value: str | None
    place: Place


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """A place that starts a process. `engine` is "" when it runs a file (`target`) whose engine is not yet known."""

    engine: str
    place: Place
    options: Mapping[str, Option] = field(default_factory=dict)  # snake_case names
    options_open: bool = False  # more options come from something we cannot read
    settings: tuple[EnvSet, ...] = ()
    blocked: tuple[Blocked, ...] = ()
    reach: Reach = ""
    open: str = ""  # why the environment cannot be known in full
    target: str = ""
    image: str = ""
    version: str = ""
    hardware: str = ""  # words that name an accelerator: node selectors, --gres, --device
    server: bool = False
    env_files: tuple[str, ...] = ()
    build: str | None = None  # folder whose Dockerfile makes the image
    scope: str = ""


FieldKind = Literal["constant", "none", "clock", "random", "computed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """One field of a request: a literal, None, drawn from a clock or a random source, or computed otherwise."""

    kind: FieldKind
    value: str
    place: Place


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One place that builds a request's sampling parameters.

    `api`: vllm, sglang, deepinfer, tensorrt_llm, endpoint (self-hosted HTTP), openai, openai-responses, anthropic.
    """

    api: str
    place: Place
    fields: Mapping[str, Field] = field(default_factory=dict)
    open: bool = False  # some fields come from elsewhere
    bare: bool = False  # a generate call that passes no sampling parameters at all
    shared: bool = False  # one object, or one literal, serves many requests


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A call people believe in: `torch.manual_seed`, `use_deterministic_algorithms`, a cudnn switch."""

    name: str
    place: Place


@dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    """A container image by reference."""

    ref: str
    engine: str
    place: Place


@dataclass(frozen=True, slots=True, kw_only=True)
class Install:
    """A package installed by pip or uv; version "" when it floats."""

    package: str
    version: str
    place: Place


@dataclass(frozen=True, slots=True, kw_only=True)
class Mount:
    """A path inside a container that does not outlive it (emptyDir, tmpfs)."""

    path: str
    medium: str
    place: Place
    scope: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Replica:
    """One member behind a service name: what must equal its siblings."""

    group: str
    name: str
    image: str | None
    command: tuple[str, ...]
    settings: Mapping[str, str | None]
    place: Place
    image_place: Place
    command_place: Place


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Why a file could not be read."""

    line: int
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """Everything one file says."""

    path: str
    kind: str
    settings: tuple[EnvSet, ...] = ()
    starts: tuple[Start, ...] = ()
    requests: tuple[Request, ...] = ()
    calls: tuple[Call, ...] = ()
    images: tuple[Image, ...] = ()
    installs: tuple[Install, ...] = ()
    mounts: tuple[Mount, ...] = ()
    replicas: tuple[Replica, ...] = ()
    blocked: tuple[Blocked, ...] = ()  # settings that reach nothing at all
    imports: tuple[str, ...] = ()
    sources: tuple[str, ...] = ()  # files whose settings are pulled in by name
    words: frozenset[str] = frozenset()  # attributes and keys read, e.g. system_fingerprint
    head_dim: int | None = None  # a model's config.json
    open: str = ""
    problem: Problem | None = None
    text: str = ""


def overflow(starts: int, settings: int, requests: int = 0) -> Problem | None:
    """The problem of a file that holds more facts than are worth joining, or None."""
    for count, most, what in (
        (starts, MAX_STARTS, "starts"),
        (settings, MAX_SETTINGS, "settings"),
        (requests, MAX_REQUESTS, "requests"),
    ):
        if count > most:
            return Problem(line=1, text=f"it holds more than {most} {what}")
    return None
