"""Re-checks a release archive offline: every byte, every digest, and that its parts are of one run.

It does not trust a name or a number it has not checked. Rules: all faults are named; a fault names the file it is in;
what cannot be checked is a fault.
"""

from __future__ import annotations

import hashlib
import json
import re
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

from harness.corpus import read_folder
from harness.errors import CorpusError, StoreError
from harness.fingerprint import Fingerprint
from harness.matrix import schema_mistake
from harness.release.archive import ARTIFACTS, MANIFEST, MANIFEST_DIGEST, SCHEMA, artifact_of
from harness.release.policy import corpus_of
from harness.release.tar import TarFaultError, read_tar

_NAME = re.compile(r"[A-Za-z0-9._-]+(/[A-Za-z0-9._-]+)*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """What a check came to: sentences about faults (none: the archive is whole), and what was checked."""

    faults: tuple[str, ...]
    files: int
    run: str
    outcome: str


def verify_archive(content: bytes) -> Checked:
    """Checks an archive's bytes; faults are returned, never raised."""
    try:
        files = read_tar(content)
    except TarFaultError as error:
        return Checked(faults=(str(error),), files=0, run="", outcome="")
    manifest, faults = _manifest(files)
    if manifest is None:
        return Checked(faults=tuple(faults), files=len(files), run="", outcome="")
    faults += _listed(files, manifest)
    if not faults:
        faults += _belong_together(files, manifest)
    return Checked(
        faults=tuple(faults), files=len(files), run=str(manifest.get("run")), outcome=str(manifest.get("outcome"))
    )


def _manifest(files: Mapping[str, bytes]) -> tuple[dict[str, Any] | None, list[str]]:
    content, line = files.get(MANIFEST), files.get(MANIFEST_DIGEST)
    if content is None or line is None:
        return None, [f"{name} is missing" for name in (MANIFEST, MANIFEST_DIGEST) if name not in files]
    faults = []
    if line != f"{hashlib.sha256(content).hexdigest()}  {MANIFEST}\n".encode():
        faults.append(f"{MANIFEST} does not have the digest that {MANIFEST_DIGEST} names: one of the two was changed")
    try:
        manifest = json.loads(content)
    except ValueError as error:
        return None, [*faults, f"{MANIFEST} is no JSON: {error}"]
    message = schema_mistake(manifest.get("schema") if isinstance(manifest, dict) else None, SCHEMA)
    if message or not isinstance(manifest.get("files"), list):
        return None, [
            *faults,
            f"{MANIFEST}: $.schema: {message}" if message else f"{MANIFEST}: $.files: expected a list",
        ]
    return manifest, faults


def _listed(files: Mapping[str, bytes], manifest: Mapping[str, Any]) -> list[str]:
    """Every file against its line in the manifest."""
    faults: list[str] = []
    listed: dict[str, str] = {}
    for item in manifest["files"]:
        if not isinstance(item, dict) or not _NAME.fullmatch(str(item.get("name"))):
            faults.append(f"{MANIFEST}: $.files: {item!r} names no file")
            continue
        name, digest = str(item["name"]), str(item.get("sha256"))
        listed[name] = digest
        content = files.get(name)
        if content is None:
            faults.append(f"{name} is missing")
        elif hashlib.sha256(content).hexdigest() != digest:
            found = hashlib.sha256(content).hexdigest()
            faults.append(f"{name} was changed: its SHA-256 is {found}, the manifest names {digest}")
    faults += [
        f"{name} is not in the manifest" for name in sorted(set(files) - set(listed) - {MANIFEST, MANIFEST_DIGEST})
    ]
    present = {artifact_of(name) for name in listed}
    return faults + [f"the artifact {name!r} is missing" for name in ARTIFACTS if name not in present]


def _belong_together(files: Mapping[str, bytes], manifest: Mapping[str, Any]) -> list[str]:
    """That all artifacts are of the manifest's run, and hold what they should."""
    faults: list[str] = []
    costs: dict[str, object] = {}
    records: dict[str, dict[str, Any]] = {}
    for name in ("cost.json", "fingerprint.json", "gate.json", "matrix.json"):
        try:
            record = json.loads(files[name])
        except ValueError as error:
            faults.append(f"{name} is no JSON: {error}")
            continue
        if not isinstance(record, dict):
            faults.append(f"{name} holds no JSON object")
            continue
        records[name] = record
        if record.get("run") != manifest.get("run"):
            faults.append(f"{name} is about run {record.get('run')}, the manifest about {manifest.get('run')}")
        if name == "gate.json" and record.get("exit_code") != manifest.get("exit_code"):
            faults.append(f"{name} decides {record.get('exit_code')}, the manifest says {manifest.get('exit_code')}")
        if name == "fingerprint.json":
            faults += _fingerprints(record)
        if name in ("cost.json", "gate.json"):
            costs[name] = record.get("sha256") if name == "cost.json" else (record.get("cost") or {}).get("sha256")
    if len(set(costs.values())) > 1:
        faults.append("cost.json is not the cost report that gate.json decided on")
    if len(records) == 4:
        faults += _decided(records["matrix.json"], records["gate.json"], files)
    return faults + _corpora(files)


def _decided(matrix: Mapping[str, Any], gate: Mapping[str, Any], files: Mapping[str, bytes]) -> list[str]:
    """That the gate decided on these verdicts, and that the corpora they rest on are here."""
    try:
        verdicts = matrix["record"]["verdicts"]
        judged = {str(one["label"]): str(one["verdict"]) for one in verdicts}
        corpora = {PurePath(corpus_of(str(one["corpus"]["name"]))).name for one in verdicts if one["corpus"]["digest"]}
        rows = {str(row["label"]): str(row["verdict"]) for row in gate["rows"]}
    except (KeyError, TypeError) as error:
        return [f"matrix.json or gate.json lacks what it should hold: {error!r}"]
    faults = [
        f"{label} is {judged.get(label, 'absent')} in matrix.json and {rows.get(label, 'absent')} in gate.json"
        for label in sorted(judged.keys() | rows.keys())
        if judged.get(label) != rows.get(label)
    ]
    here = {name.split("/")[1] for name in files if name.startswith("corpus/")}
    return faults + [f"corpus {name!r} was run and is not in the archive" for name in sorted(corpora - here)]


def _fingerprints(record: Mapping[str, Any]) -> list[str]:
    faults = []
    for side in ("observer", "subject"):
        try:
            Fingerprint.from_json(record.get(side))
        except StoreError as error:
            faults.append(f"fingerprint.json: $.{side}: {error}")
    return faults


def _corpora(files: Mapping[str, bytes]) -> list[str]:
    """Every corpus against its own manifest and content digest."""
    faults: list[str] = []
    with tempfile.TemporaryDirectory(prefix="samebits-") as scratch:
        names = [
            name for name in sorted(files) if name.startswith("corpus/") and _NAME.fullmatch(name) and ".." not in name
        ]
        for name in names:
            place = Path(scratch) / name
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(files[name])
        for folder in sorted(Path(scratch).glob("corpus/*")):
            try:
                read_folder(folder, f"archived corpus {folder.name}")
            except CorpusError as error:
                faults.append(f"corpus/{folder.name}: {str(error).replace(scratch, '')}")
    return faults
