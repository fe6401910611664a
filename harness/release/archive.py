"""The archive of a release: five artifacts and a manifest of their digests, in one file that can be checked offline.

It does not run or decide. Rules: the frozen corpora, the matrix with its verdicts, the cost report, the fingerprint and
the gate's decision, all of one run; log tails and what names a host stay out unless asked for; the same run makes the
same bytes.

    manifest.json, manifest.sha256
    corpus/<name>/...      as frozen
    cost.json  fingerprint.json  gate.json  matrix.json
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from harness import __version__
from harness.baseline.accept import publishable
from harness.corpus import load_corpus
from harness.corpus.manifest import MANIFEST as CORPUS_MANIFEST
from harness.corpus.manifest import read_manifest
from harness.corpus.retokenise import retokenise
from harness.cost.record import RECORD as COST
from harness.engine import Tokenizer
from harness.errors import StoreError, UsageError
from harness.fingerprint import Fingerprint, fingerprint_of
from harness.fingerprint.privacy import Private, public_field
from harness.finished import FinishedRun
from harness.release.gate_record import read_gate
from harness.release.tar import write_tar
from harness.seal import unsealed

SCHEMA = 1
MANIFEST = "manifest.json"
MANIFEST_DIGEST = "manifest.sha256"
ARTIFACTS = ("corpus", "cost", "fingerprint", "gate", "matrix")


@dataclass(frozen=True, slots=True, kw_only=True)
class Disclosure:
    """What may be published. `logs` also lets log tails, the host's name and paths through."""

    private: Private
    logs: bool = False


def make_archive(run: FinishedRun, tokenizer: Tokenizer | None, disclosure: Disclosure) -> bytes:
    """The archive's bytes. `tokenizer` is the model's; None: it is not at hand, so corpora cannot be checked.

    Raises:
        UsageError: a corpus that is not the one that was run.
        StoreError: no gate decision, or one about another run.
    """
    folder = run.folder or Path()
    gate = unsealed(read_gate(folder, run))
    files = {
        "matrix.json": _json(_matrix(run, disclosure)),
        "cost.json": _json(_cost(run, gate, disclosure)),
        "fingerprint.json": _json(_fingerprint(run, disclosure)),
        "gate.json": _json(_published(gate, disclosure)),
    }
    corpora = _corpora(run, tokenizer)
    for name, content in corpora.items():
        files[f"corpus/{name}"] = content
    manifest = _json(_manifest(run, gate, files))
    files[MANIFEST] = manifest
    files[MANIFEST_DIGEST] = f"{hashlib.sha256(manifest).hexdigest()}  {MANIFEST}\n".encode()
    return write_tar(files)


def artifact_of(name: str) -> str:
    """Which of the five a file belongs to."""
    return name.partition("/")[0].removesuffix(".json")


def _manifest(run: FinishedRun, gate: Mapping[str, object], files: Mapping[str, bytes]) -> dict[str, object]:
    return {
        "schema": SCHEMA,
        "samebits": __version__,
        "run": run.digest,
        "started": run.started,
        "decided": gate["decided"],
        "exit_code": gate["exit_code"],
        "outcome": gate["outcome"],
        "files": [
            {"name": name, "artifact": artifact_of(name), "sha256": hashlib.sha256(files[name]).hexdigest(),
             "bytes": len(files[name])}
            for name in sorted(files)
        ],
    }  # fmt: skip


def _matrix(run: FinishedRun, disclosure: Disclosure) -> object:
    """The run's record as it may be published; it names the digest of the record it was made from."""
    record: dict[str, Any] = json.loads(json.dumps(unsealed(run.raw)))
    record["model"] = run.model
    record["fingerprint"] = {"observer": [], "subject": []}  # fingerprint.json holds it
    if not disclosure.logs:
        for verdict in cast("list[dict[str, Any]]", record["verdicts"]):
            if verdict["error"]:
                verdict["error"]["log_tail"] = []
    return {"schema": SCHEMA, "run": run.digest, "record": _published(record, disclosure)}


def _cost(run: FinishedRun, gate: Mapping[str, object], disclosure: Disclosure) -> dict[str, object]:
    """The cost report that the gate was given, as it may be published; without one, that there is none."""
    given = cast("Mapping[str, object] | None", gate.get("cost"))
    report = None if given is None else _report(run.folder or Path(), str(given["sha256"]))
    return {
        "schema": SCHEMA,
        "run": run.digest,
        "seconds": run.raw.get("seconds"),
        "measured": report is not None or bool(run.cost),
        "cost": run.raw.get("cost"),
        "sha256": None if given is None else given["sha256"],
        "report": None if report is None else _published(report, disclosure),
        "note": "" if report or run.cost else "nobody measured what the run's mode costs",
    }


def _report(folder: Path, sha256: str) -> dict[str, Any]:
    """The cost report beside the gate's decision, to the byte the one it decided on. Raises StoreError."""
    file = folder / COST
    try:
        content = file.read_bytes()
    except OSError as error:
        raise StoreError(
            f"{file}: expected the cost report the gate was given: {error.strerror}; gate again"
        ) from error
    if hashlib.sha256(content).hexdigest() != sha256:
        raise StoreError(f"{file}: it is not the cost report the gate decided on; run `samebits gate` again")
    record: dict[str, Any] = json.loads(content)
    record["fingerprint"] = {"observer": [], "subject": []}  # fingerprint.json holds the run's
    return record


def _fingerprint(run: FinishedRun, disclosure: Disclosure) -> dict[str, object]:
    return {"schema": SCHEMA, "run": run.digest, **{
        side: _shown(fingerprint_of(public_field(item) for item in fields), disclosure).to_json()
        for side, fields in (("observer", run.observer), ("subject", run.subject))
    }}  # fmt: skip


def _shown(fingerprint: Fingerprint, disclosure: Disclosure) -> Fingerprint:
    return fingerprint if disclosure.logs else publishable(fingerprint)


def _published(value: object, disclosure: Disclosure) -> object:
    return value if disclosure.logs else disclosure.private.redact_value(value)


def _corpora(run: FinishedRun, tokenizer: Tokenizer | None) -> dict[str, bytes]:
    """Files of every corpus that was run, each checked to be the one of the record."""
    files: dict[str, bytes] = {}
    wanted = sorted({(pair.corpus, pair.corpus_digest) for pair in run.pairs if pair.corpus_digest})
    if not wanted:
        raise UsageError("the run judged no corpus; there is nothing to release")
    for name, digest in wanted:
        corpus = load_corpus(name)
        if tokenizer is None:
            raise UsageError(f"corpus {name!r}: model {run.model!r} is not at hand, so it cannot be shown that this is "
                             "the corpus that was run; get the model (`samebits models` says how)")  # fmt: skip
        found = retokenise(corpus, tokenizer).digest
        if found != digest:
            raise UsageError(f"corpus {name!r}: the run used digest {digest[:12]}, this one has {found[:12]}: it was "
                             "changed since; restore it, or run again")  # fmt: skip
        mine = _corpus_files(corpus.path)
        if any(files.get(file, content) != content for file, content in mine.items()):
            raise UsageError(f"corpus {name!r}: another corpus of this run lies in a folder of the same name, and an "
                             "archive keeps one of each; rename one and run again")  # fmt: skip
        files |= mine
    return files


def _corpus_files(folder: Path) -> dict[str, bytes]:
    manifest = read_manifest(folder, f"corpus {folder.name}")
    names = sorted({CORPUS_MANIFEST, *(name for name, _ in manifest.files)})
    try:
        return {f"{folder.name}/{name}": (folder / name).read_bytes() for name in names}
    except OSError as error:
        raise StoreError(f"corpus {folder.name}: cannot be read: {error.strerror}") from error


def _json(value: object) -> bytes:
    return (json.dumps(value, indent=1, sort_keys=True, allow_nan=False) + "\n").encode()
