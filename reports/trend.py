"""The trend of nightly runs as one self-contained page. It does not know files; the data comes as plain values.

Rules: every value goes through the template engine's escaping; a state is told by word and mark, never by colour alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

TEMPLATES = Path(__file__).parent / "templates"
_MARKS = {"PASS": "✓", "APPROVED": "✓", "FAIL": "✗", "ERROR": "!", "INSUFFICIENT": "?", "UNSUPPORTED": "–"}


def render_trend(trend: Mapping[str, object]) -> str:
    """The page as text."""
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True, keep_trailing_newline=True,
    )  # fmt: skip
    return environment.get_template("trend.html.j2").render(trend=trend, marks=_MARKS)
