"""What a shell script has done up to the line being read: its variables, arrays, and the arm it stands in."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from harness.doctor.facts import Blocked, EnvSet, Image, Install, Request, Start
from harness.doctor.finding import Place

if TYPE_CHECKING:
    import tree_sitter


@dataclass(slots=True, kw_only=True)
class ShellState:
    """What is known at the line being read."""

    path: str
    offset: int
    exported: dict[str, EnvSet] = field(default_factory=dict)
    local: dict[str, EnvSet] = field(default_factory=dict)
    arrays: dict[str, list[str]] = field(default_factory=dict)
    allexport: bool = False
    slurm_export: str = ""
    branch: tuple[str, ...] = ()
    guard: str = ""
    scope: str = ""
    hardware: str = ""
    nested: int = 0
    settings: list[EnvSet] = field(default_factory=list)
    blocked: list[Blocked] = field(default_factory=list)
    starts: list[Start] = field(default_factory=list)
    images: list[Image] = field(default_factory=list)
    installs: list[Install] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)
    sources: list[str] = field(default_factory=list)

    def place(self, node: tree_sitter.Node) -> Place:
        return Place(self.path, node.start_point[0] + 1 + self.offset)


def set_variable(state: ShellState, setting: EnvSet, *, export: bool) -> None:
    if export:
        state.exported[setting.name] = setting
        state.local.pop(setting.name, None)
        state.settings.append(setting)
    else:
        state.local[setting.name] = setting
