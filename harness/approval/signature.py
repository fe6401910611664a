"""SSH signatures of approvals, made and checked by OpenSSH's `ssh-keygen -Y`, as git does it.

It does not know approvals' contents. Rules: the signed bytes are the file's; the namespace is ours, so that a signature
made for git or mail proves nothing here; a key must be allowed, in this namespace, at the time that is passed in; what
cannot be checked is refused, with the reason.
"""

from __future__ import annotations

import base64
import binascii
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from pathlib import Path

from harness.errors import UsageError

NAMESPACE = "samebits-approval"
TIMEOUT_S = 60.0
_GOOD = re.compile(r'^Good "[^"]+" signature(?: for (?P<name>.+?))? with (?P<key>\S+ key \S+)', re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Signature:
    """One signature and what became of it.

    `signer` is its principal when it counts, else None and `problem` says why. `intact` is False when the signature is
    not one of these bytes in our namespace.
    """

    file: str
    intact: bool
    signer: str | None
    key: str
    problem: str = ""


def sign(content: bytes, key: Path) -> bytes:
    """A detached signature in OpenSSH's armour. Raises UsageError when the key cannot sign."""
    if not key.exists():
        raise UsageError(f"--key {key}: no such file; give your SSH private key, or its .pub with the key in an agent")
    done = _keygen(["-Y", "sign", "-q", "-f", str(key), "-n", NAMESPACE], content, ask=True)
    if done.returncode != 0:
        raise UsageError(f"--key {key}: ssh-keygen cannot sign with it: {_last(done)}")
    return done.stdout


def check(content: bytes, armour: bytes, signers: Path, author: str, moment: datetime, *, file: str) -> Signature:
    """Checks one signature over `content` against an `allowed_signers` file at a time.

    `author` chooses the name where a key may sign for several. Raises UsageError without ssh-keygen or signers.
    """
    if not signers.is_file():
        raise UsageError(f"--allowed-signers {signers}: no such file; it lists who may sign, one principal a line")
    problem = namespace_problem(armour)
    if problem:
        return Signature(file=file, intact=False, signer=None, key="", problem=problem)
    with tempfile.TemporaryDirectory(prefix="samebits-") as folder:
        place = Path(folder) / "signature"
        place.write_bytes(armour)
        done = _verify(content, place, signers, author, moment)
        good = _GOOD.search(done.stdout.decode(errors="replace"))
        if done.returncode == 0 and good is not None:  # the usual case: the author's own signature
            return Signature(file=file, intact=True, signer=author, key=good["key"])
        return _examine(content, place, signers, author, moment, file)


def _examine(content: bytes, place: Path, signers: Path, author: str, moment: datetime, file: str) -> Signature:
    """Whose a signature is that is not the author's, or why it is nobody's."""
    whole = _keygen(["-Y", "check-novalidate", "-n", NAMESPACE, "-s", str(place)], content)
    good = _GOOD.search(whole.stdout.decode(errors="replace"))
    if whole.returncode != 0 or good is None:
        problem = "the signature is not one of this file's bytes"
        return Signature(file=file, intact=False, signer=None, key="", problem=problem)
    signer, problem = _principal(content, place, signers, author, moment)
    return Signature(file=file, intact=True, signer=signer, key=good["key"], problem=problem)


def namespace_problem(armour: bytes) -> str:
    """Why an armoured signature is none of ours; empty when its namespace is right.

    Layout (PROTOCOL.sshsig): "SSHSIG", u32 version, string public key, string namespace, ...
    """
    lines = armour.decode("ascii", errors="replace").strip().splitlines()
    if len(lines) < 3 or lines[0] != "-----BEGIN SSH SIGNATURE-----" or lines[-1] != "-----END SSH SIGNATURE-----":
        return "it is no SSH signature"
    try:
        blob = base64.b64decode("".join(lines[1:-1]), validate=True)
    except (binascii.Error, ValueError):
        return "it is a damaged SSH signature"
    _, rest = _string(blob[10:])
    namespace, _ = _string(rest)
    if not blob.startswith(b"SSHSIG") or not namespace:
        return "it is a damaged SSH signature"
    if namespace != NAMESPACE.encode():
        return f"it was made in namespace {namespace.decode(errors='replace')!r}, not {NAMESPACE!r}"
    return ""


def _string(data: bytes) -> tuple[bytes, bytes]:
    """A length-prefixed string and what follows it."""
    length = int.from_bytes(data[:4], "big")
    return data[4 : 4 + length], data[4 + length :]


def _principal(content: bytes, place: Path, signers: Path, author: str, moment: datetime) -> tuple[str | None, str]:
    """(who signed, why nobody counts)."""
    found = _keygen(["-Y", "find-principals", "-s", str(place), "-f", str(signers), _at(moment)], b"")
    names = found.stdout.decode(errors="replace").split() if found.returncode == 0 else []
    problem = _reason(found, signers)
    for name in sorted(names, key=lambda name: not fnmatchcase(author, name)):
        principal = author if fnmatchcase(author, name) else name
        done = _verify(content, place, signers, principal, moment)
        if done.returncode == 0:
            return principal, ""
        problem = _reason(done, signers)
    return None, problem


def _verify(
    content: bytes, place: Path, signers: Path, principal: str, moment: datetime
) -> subprocess.CompletedProcess[bytes]:
    arguments = ["-Y", "verify", "-f", str(signers), "-I", principal, "-n", NAMESPACE, "-s", str(place), _at(moment)]
    return _keygen(arguments, content)


def _at(moment: datetime) -> str:
    return f"-Overify-time={moment.astimezone(UTC):%Y%m%d%H%M%S}"


def _reason(done: subprocess.CompletedProcess[bytes], signers: Path) -> str:
    """Why no principal counts, out of what ssh-keygen says."""
    text = done.stderr.decode(errors="replace")
    for mark, words in (
        ("has expired", "the key's time in the allowed signers is over"),
        ("not yet valid", "the key's time in the allowed signers has not begun"),
        ("not permitted for use in signature namespace", f"the key is not allowed in namespace {NAMESPACE!r}"),
    ):
        if mark in text:
            return words
    if "missing key" in text or "invalid" in text:
        return f"{signers.name} does not read as allowed signers ({_last(done)})"
    return "the key is not among the allowed signers"


def _keygen(arguments: Sequence[str], content: bytes, *, ask: bool = False) -> subprocess.CompletedProcess[bytes]:
    """Runs ssh-keygen in UTC and English; `ask` lets it ask for a passphrase."""
    program = shutil.which("ssh-keygen")
    if program is None:
        raise UsageError(
            "ssh-keygen is not on the PATH; install OpenSSH's client (Debian: apt-get install openssh-client)"
        )
    environment = {**os.environ, "TZ": "UTC", "LC_ALL": "C"}
    if not ask:
        environment.pop("SSH_ASKPASS", None)
    return subprocess.run(  # noqa: S603 - a fixed program with our own arguments
        [program, *arguments], input=content, capture_output=True, env=environment, timeout=TIMEOUT_S, check=False
    )


def _last(done: subprocess.CompletedProcess[bytes]) -> str:
    lines = done.stderr.decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else f"status {done.returncode}"
