"""One run from plan to record: folder, execution, judging, decision, reports.

It does not know how any of these steps works. Rules: a folder holds one run, and one process writes in it at a time; an
interrupted run of the same plan is resumed; a finished run or another plan is never overwritten silently; nothing is
written before the plan stands.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from harness.baseline.environment import References
from harness.capture import Capture
from harness.cost.indicative import indicative_line
from harness.engine import Adapter
from harness.errors import OutputError, StoreError, UsageError
from harness.execute import Executor, case_requests
from harness.expected import Expected, expected_of
from harness.fingerprint import fingerprint_of
from harness.fingerprint.host import host_fields
from harness.gate import decide, left_out_words
from harness.judge import Captures, judge
from harness.lifetime import Failure
from harness.plan import Plan, slug
from harness.progress import Progress
from harness.record import PLAN, RECORD, Outcome, run_record, write_json
from harness.seal import sealed
from harness.store import Store
from harness.verdict import Verdict

BACKGROUNDS = "backgrounds"  # folder of a run
# What a run leaves, and what was made of it later: a decision, a trend or an archive of a run that is gone is a lie.
_FOLDERS = ("captures", "logs", "caches", BACKGROUNDS, "gate")
_FILES = (RECORD, PLAN, "report.html", "summary.md", "junit.xml", "gate.json", "gate.md", "cost.json", "trend.json",
          "trend.html", "release.tar", "eval.json", "eval.html", "eval.md")  # fmt: skip
Reporter = Callable[[Mapping[str, object], Path], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRequest:
    """What to run and where. `begun` is `time.monotonic()` at the start of the command."""

    plan: Plan
    adapter: Adapter
    folder: Path
    progress: Progress
    deadline_s: float
    overwrite: bool
    begun: float
    baselines: str | None = None  # folder or URL; what pairs on an environment axis are held against
    nightly: bool = False  # an unchanged environment with the same bits is a plain PASS


def run(request: RunRequest, report: Reporter) -> dict[str, object]:
    """Executes, judges and reports; returns the record. Raises OutputError, UsageError; KeyboardInterrupt is the
    caller's: the folder then holds a resumable run."""
    with alone_in(request.folder):
        return _run(request, report)


def _run(request: RunRequest, report: Reporter) -> dict[str, object]:
    started = datetime.now(UTC)
    plan, folder = request.plan, request.folder
    resumed = prepare_folder(folder, plan, overwrite=request.overwrite)
    if resumed:
        request.progress.note(f"resuming the interrupted run in {folder}")
    write_backgrounds(plan, folder)
    executor = Executor(plan, request.adapter, folder, secrets.token_hex(8), request.progress, request.deadline_s)
    execution = executor.run()
    captures = load_captures(plan, executor.store, execution.failures)
    verdicts = judge_all(plan, captures, find_references(request))
    exit_code, sentence = decide(verdicts, len(plan.pairs))
    sentence += left_out_words(plan.matrix.left_out, plan.matrix.name)
    outcome = Outcome(
        exit_code=exit_code, sentence=sentence, started=started, finished=datetime.now(UTC),
        seconds=time.monotonic() - request.begun, worker_seconds=execution.worker_seconds,
    )  # fmt: skip
    observer = fingerprint_of(host_fields(os.environ, now=started)).fields
    record = run_record(plan, verdicts, captures, execution, outcome, observer)
    record = sealed({**record, "cost": indicative_line(plan, captures)})
    report(record, folder)
    write_json(folder / RECORD, record)
    return record


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Makes a folder and keeps other runs out of it; the lock goes with the process. Raises UsageError, OutputError."""
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"--out {folder}: expected a folder, found a file; choose another")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError as error:
        raise OutputError(f"--out {folder}: cannot be made: {error.strerror}; choose another") from error
    try:
        _lock(descriptor, folder)
        yield
    finally:
        os.close(descriptor)


def _lock(descriptor: int, folder: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise UsageError(
            f"--out {folder}: another run is writing there now; wait for it, or choose another folder"
        ) from error
    except OSError as error:
        raise OutputError(f"--out {folder}: cannot be locked: {error.strerror}; choose one on a local disk") from error


def judge_all(plan: Plan, captures: Captures, references: References | None = None) -> tuple[Verdict, ...]:
    """A verdict for every planned pair."""
    expected = expected_captures(plan)
    return tuple(judge(pair, captures, expected, references) for pair in plan.pairs)


def find_references(request: RunRequest) -> References:
    """The baselines of the planned pairs on an environment axis. Raises StoreError for damaged ones."""
    from harness.baseline.find import accepted_for

    found = {} if request.baselines is None else accepted_for(request.plan, request.baselines)
    return References(accepted=found, nightly=request.nightly)


def expected_captures(plan: Plan) -> dict[str, tuple[Expected, ...]]:
    """What the capture of each case must hold."""
    return {
        case_id: expected_of(case_requests(plan, case), case.requests, case.schedule)
        for case_id, case in plan.cases.items()
    }


def load_captures(plan: Plan, store: Store, failures: Mapping[str, Failure]) -> dict[str, Capture | Failure]:
    """What each planned case came to; a damaged capture is a Failure."""
    captures: dict[str, Capture | Failure] = {}
    for case in plan.cases:
        if case in failures:
            captures[case] = failures[case]
            continue
        try:
            captures[case] = store.read(case)
        except StoreError as error:
            captures[case] = Failure(kind="error", message=str(error), log_tail=())
    return captures


def prepare_folder(folder: Path, plan: Plan, *, overwrite: bool) -> bool:
    """Makes the run's folder ready; True when it holds an interrupted run of this plan.

    Raises:
        UsageError: the folder holds a finished run, another plan, or files that are no run of ours.
        OutputError: it cannot be written.
    """
    file = folder / PLAN
    replaced = overwrite and (file.exists() or (folder / RECORD).exists())
    if replaced:
        _clear(folder)
    if (folder / RECORD).exists():
        raise UsageError(f"--out {folder}: holds a finished run; choose another folder or pass --overwrite")
    if file.exists():
        if _stored_digest(file) != plan.digest:
            raise UsageError(f"--out {folder}: holds an interrupted run of another plan; "
                             "choose another folder or pass --overwrite")  # fmt: skip
        return True
    if folder.exists() and not replaced and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"--out {folder}: expected a new or empty folder, found other files; choose another")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(f"--out {folder}: cannot be made: {error.strerror}; choose another") from error
    write_json(file, {"schema": 1, "digest": plan.digest, **plan.counts})
    return False


def write_backgrounds(plan: Plan, folder: Path) -> None:
    """Every background as it was drawn; `file:` with such a file replays it."""
    for name in sorted(plan.backgrounds):
        (folder / BACKGROUNDS).mkdir(exist_ok=True)
        write_json(folder / BACKGROUNDS / f"{slug(name)}.json", plan.backgrounds[name].to_json())


def _clear(folder: Path) -> None:
    """Removes what a run wrote and what was made of it, and only that."""
    for name in _FOLDERS:
        shutil.rmtree(folder / name, ignore_errors=True)
    for name in _FILES:
        (folder / name).unlink(missing_ok=True)


def _stored_digest(file: Path) -> object:
    try:
        stored = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"{file}: expected the plan of an interrupted run: {error}") from error
    return stored.get("digest") if isinstance(stored, dict) else None
