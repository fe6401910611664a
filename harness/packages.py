"""Whether a package can be imported, asked without importing it. It knows no engine."""

from __future__ import annotations

import importlib.util


def is_installed(package: str) -> bool:
    """True for a package that is there; a mere folder of its name on the path, which Python would import, is none."""
    spec = importlib.util.find_spec(package)
    return spec is not None and spec.origin is not None
