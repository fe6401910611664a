"""One process under construction: its words, its environment, and what was lost on the way.

It knows no wrapper and no engine.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from harness.doctor.facts import Blocked, EnvSet, Image
from harness.doctor.finding import Place

UNKNOWN = "\0"  # stands inside a word for a part that the text does not tell


@dataclass(slots=True, kw_only=True)
class Process:
    """The process under construction while wrappers are peeled."""

    words: list[str]
    place: Place
    settings: dict[str, EnvSet]
    blocked: list[Blocked] = field(default_factory=list)
    image: str = ""
    images: list[Image] = field(default_factory=list)
    env_files: list[str] = field(default_factory=list)
    hardware: str = ""
    contained: bool = False
    open: str = ""
    entrypoint: str = ""

    def keep_only(self, names: set[str], reason: str) -> None:
        """Drops every setting but `names`; each dropped one is remembered with the reason."""
        for name in [name for name in self.settings if name not in names]:
            setting = self.settings.pop(name)
            if not setting.unset:
                self.blocked.append(Blocked(setting=setting, place=self.place, reason=reason))

    def set_value(self, name: str, value: str | None) -> None:
        self.settings[name] = EnvSet(name=name, value=value, place=self.place)
        self.blocked = [lost for lost in self.blocked if lost.setting.name != name]


def known_text(value: str) -> str | None:
    return None if UNKNOWN in value else value
