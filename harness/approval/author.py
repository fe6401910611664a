"""Who signs and with which key, as git already knows them. Reads git's configuration and nothing else."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from harness.errors import UsageError


def author_of(given: str | None) -> str:
    """The author as given, or git's `user.email`. Raises UsageError when nobody is named."""
    found = given or _git("user.email")
    if not found:
        raise UsageError("--author: nobody is named and git has no user.email; say who answers for this")
    return found


def key_of(given: Path | None) -> Path:
    """The signing key as given, or git's `user.signingkey`. Raises UsageError."""
    if given is not None:
        return given
    found = _git("user.signingkey")
    if not found or found.startswith(("key::", "ssh-")):
        raise UsageError("--key: no key is named and git has no user.signingkey file; give your SSH key, or --unsigned "
                         "where the policy allows approvals without a signature")  # fmt: skip
    return Path(found).expanduser()


def _git(name: str) -> str:
    program = shutil.which("git")
    if program is None:
        return ""
    done = subprocess.run(  # noqa: S603 - a fixed program
        [program, "config", "--get", name], capture_output=True, text=True, check=False
    )
    return done.stdout.strip()
