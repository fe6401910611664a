"""A launch: one start of an engine, and everything in the files read that reaches it.

It knows what is in force and how the engine reads it; `reach` knows how files reach each other.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property, lru_cache

from harness.doctor.facts import Blocked, Call, Document, EnvSet, Option, Request, Start
from harness.doctor.near_miss import closest_name
from harness.doctor.variables import FLAGS, NEIGHBOURS, VARIABLES, State, read_value

MODES = {
    "vllm": "VLLM_BATCH_INVARIANT",
    "deepinfer": "DEEPINFER_BATCH_INVARIANT",
    "tensorrt_llm": "FORCE_DETERMINISTIC",
}


@dataclass(frozen=True, kw_only=True)
class Launch:
    """One start and what reaches it, in the order in which it takes effect."""

    start: Start
    document: Document
    settings: tuple[EnvSet, ...]
    blocked: tuple[Blocked, ...]
    requests: tuple[Request, ...]
    calls: tuple[Call, ...]
    open: str  # why some setting may be unknown to us, or ""
    head_dim: int | None = None
    options: dict[str, Option] = field(default_factory=dict)

    @property
    def engine(self) -> str:
        """The engine that is started."""
        return self.start.engine

    def last(self, name: str) -> EnvSet | None:
        """The setting of `name` that is in force, or None when nothing sets it."""
        found = None
        for setting in self.settings:
            if setting.name == name:
                found = setting
        return None if found is not None and found.unset else found

    def state(self, name: str) -> State:
        """What the engine makes of `name`: absent, or its value as the engine reads it."""
        setting = self.last(name)
        return "absent" if setting is None else read_value(VARIABLES[name], setting.value)

    def option(self, *names: str) -> str | None:
        """The first of these options that is given: its value, or "?" when computed; None when absent."""
        for name in names:
            if name in self.options:
                return self.options[name].value if self.options[name].value is not None else "?"
        return None

    def lacks(self, *names: str) -> bool:
        """Whether none of these options is given, as far as all options can be seen."""
        return not self.start.options_open and self.option(*names) is None

    @cached_property
    def misspelt(self) -> frozenset[str]:
        """Known variables that some setting here nearly spells."""
        near = (near_variable(setting.name) for setting in self.settings)
        return frozenset(name for name in near if name)

    @property
    def mode_on(self) -> bool:
        """Whether the engine's deterministic mode is on, or set to something we cannot see."""
        if self.engine == "sglang":
            given = self.option("enable_deterministic_inference")
            return given not in (None, "false", "none") or self.option("rl_on_policy_target") not in (None, "none")
        return self.engine in MODES and self.state(MODES[self.engine]) in ("true", "unknown")


@lru_cache(maxsize=8192)
def near_variable(name: str) -> str | None:
    """The flag that `name` nearly spells, or None."""
    if name in VARIABLES or name in NEIGHBOURS or len(name) < 8 or len(name) > 80:
        return None
    return closest_name(name, (*FLAGS, "CUBLAS_WORKSPACE_CONFIG", "DEEPINFER_USE_NEXTN_DECODE", "NCCL_ALGO"))


@dataclass(frozen=True, kw_only=True)
class Scan:
    """Everything read, and the launches in it."""

    documents: tuple[Document, ...]
    launches: tuple[Launch, ...]

    @cached_property
    def settings(self) -> tuple[EnvSet, ...]:
        """Every setting of every file, once each."""
        seen: dict[EnvSet, None] = {}
        for document in self.documents:
            for setting in document.settings:
                seen.setdefault(setting)
            for start in document.starts:
                for setting in start.settings:
                    seen.setdefault(setting)
        return tuple(seen)
