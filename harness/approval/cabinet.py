"""The folder approvals lie in: reading all of them with their signatures, and filing a new one.

It does not rule on them. Rules: an approval lies in a folder named for its cell; its signatures lie beside it as
`NAME.toml.sig`, `NAME.toml.2.sig`, …; a file that cannot be read is kept, with the reason, and not passed over.
"""

from __future__ import annotations

import os
from datetime import datetime
from pathlib import Path

from harness.approval.record import Approval, ApprovalMistakeError, read_approval, write_approval
from harness.approval.ruling import Filed
from harness.approval.signature import Signature, check
from harness.errors import OutputError, UsageError

SUFFIX = ".toml"
NOT_CHECKED = "no allowed signers were given; pass --allowed-signers FILE"


def read_cabinet(folder: Path, signers: Path | None, now: datetime) -> tuple[Filed, ...]:
    """Every approval below a folder, sorted by name. `now` is when keys must be allowed. Raises UsageError."""
    if not folder.is_dir():
        raise UsageError(f"--approvals {folder}: no such folder; name the one `samebits approve` writes to")
    return tuple(_filed(file, folder, signers, now) for file in sorted(folder.rglob(f"*{SUFFIX}")))


def signature_files(file: Path) -> tuple[Path, ...]:
    """The signatures of an approval, sorted."""
    return tuple(sorted(file.parent.glob(f"{file.name}*.sig")))


def file_approval(approval: Approval, folder: Path) -> Path:
    """Writes an approval into its cell's folder; never over another one. Raises UsageError, OutputError."""
    name = f"{approval.created:%Y%m%d}-{approval.variant}-{approval.kind}-{approval.new[:8]}{SUFFIX}"
    file = folder / approval.cell / name
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("xb") as stream:
            stream.write(write_approval(approval))
    except FileExistsError as error:
        raise UsageError(f"{file}: this difference is approved there already; remove it first, or add a signature with "
                         "`samebits cosign`") from error  # fmt: skip
    except OSError as error:
        raise OutputError(f"{file}: cannot be written: {error.strerror}; choose another --approvals") from error
    return file


def file_signature(file: Path, armour: bytes) -> Path:
    """Puts a signature beside its approval. Raises OutputError."""
    number = len(signature_files(file)) + 1
    place = file.with_name(f"{file.name}.sig" if number == 1 else f"{file.name}.{number}.sig")
    try:
        descriptor = os.open(place, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(armour)
    except OSError as error:
        raise OutputError(f"{place}: cannot be written: {error.strerror}") from error
    return place


def _filed(file: Path, folder: Path, signers: Path | None, now: datetime) -> Filed:
    relative = file.relative_to(folder)
    content, approval, mistake = b"", None, ""
    try:
        content = file.read_bytes()
        approval = read_approval(content)
    except OSError as error:
        mistake = error.strerror or "unreadable"
    except ApprovalMistakeError as error:
        mistake = str(error)
    signatures: tuple[Signature, ...] = ()
    if approval is not None:
        signatures = tuple(_signature(place, content, signers, approval.author, now) for place in signature_files(file))
    return Filed(
        name=relative.as_posix(), folder=relative.parts[0] if len(relative.parts) > 1 else "", approval=approval,
        mistake=mistake, signatures=signatures, unchecked="" if signers else NOT_CHECKED,
    )  # fmt: skip


def _signature(place: Path, content: bytes, signers: Path | None, author: str, now: datetime) -> Signature:
    if signers is None:
        return Signature(file=place.name, intact=True, signer=None, key="", problem=NOT_CHECKED)
    try:
        armour = place.read_bytes()
    except OSError as error:
        return Signature(file=place.name, intact=False, signer=None, key="", problem=error.strerror or "unreadable")
    return check(content, armour, signers, author, now, file=place.name)
