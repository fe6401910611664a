"""From a command line to a measured and recorded session.

It does not know processes' insides or reports. Rules: everything is checked before the first process starts; a folder
holds one measurement; another one's files are never overwritten silently.
"""

from __future__ import annotations

import os
import secrets
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from harness import registry
from harness.choose import default_model
from harness.corpus import Corpus, check_fits, load_corpus, retokenise
from harness.cost.arm import OFF, ON, Arms, choose_arms, configuration_differences
from harness.cost.bench import OpenBench, Subject, open_processes
from harness.cost.capacity import Limits
from harness.cost.comparison import compare
from harness.cost.load import Load, closed_loop, poisson, read_trace
from harness.cost.record import RECORD, Circumstances, cost_record, write_tables
from harness.cost.session import Design, run_session
from harness.engine import Adapter
from harness.errors import OutputError, UsageError
from harness.fingerprint import fingerprint_of
from harness.fingerprint.host import host_fields
from harness.record import write_json
from harness.settings import mode_settings, parse_assignments

DEFAULT_CONCURRENCY = "1,4,16"
OPEN_LOOP_REQUESTS = 32
WRITTEN = (RECORD, "cost.html", "requests.parquet", "metrics.parquet")
FOLDERS = ("timings", "references", "logs")


@dataclass(frozen=True, slots=True, kw_only=True)
class CostRequest:
    """What the command line asks for; texts are as they were typed."""

    engine: str
    model: str | None
    mode: str | None
    assignments: tuple[str, ...]
    on: tuple[str, ...]
    off: tuple[str, ...]
    shown: tuple[str, ...] | None
    corpus: str
    concurrency: str | None
    rates: str | None
    trace: Path | None
    count: int | None
    pairs: int
    ttft_limit: float | None
    itl_limit: float | None
    seed: int
    slowed: float
    out: Path | None
    overwrite: bool
    deadline_s: float


def measure(
    request: CostRequest, note: Callable[[str], None], opener: Callable[[Subject], OpenBench] = open_processes
) -> tuple[dict[str, object], Path]:
    """Measures and records; returns the record and its folder.

    Raises:
        UsageError: anything that cannot be used, before a process is started.
        EngineError, Unsupported: the engine's own failures.
    """
    begun, started = time.monotonic(), datetime.now(UTC)
    adapter = registry.adapter(request.engine)
    model = request.model if request.model is not None else default_model(request.engine)
    arms = _arms(adapter, request)
    corpus = _corpus(adapter, model, request.corpus)
    design = make_design(request, tuple(one.id for one in corpus.requests))
    folder = request.out or Path(".samebits") / "cost" / f"{started:%Y%m%dT%H%M%SZ}-{request.engine}"
    prepare_folder(folder, overwrite=request.overwrite)
    subject = Subject(adapter=adapter, model=model, requests=corpus.requests, folder=folder,
                      session=secrets.token_hex(8), deadline_s=request.deadline_s)  # fmt: skip
    note(f"{request.engine}, {model}: on {arms.on.label}, off {arms.off.label}; folder {folder}")
    session = run_session(design, arms, opener(subject), note)
    found = compare(session)
    around = Circumstances(
        engine=request.engine, model=model, corpus=corpus, started=started, finished=datetime.now(UTC),
        seconds=time.monotonic() - begun, observer=fingerprint_of(host_fields(os.environ, now=started)).fields,
        differences=configuration_differences(
            adapter, (arms.on, arms.off), (session.started[ON].fields, session.started[OFF].fields)
        ),
    )  # fmt: skip
    record = cost_record(session, found, around)
    write_tables(session, folder)
    write_json(folder / RECORD, record)
    return record, folder


def make_design(request: CostRequest, ids: tuple[str, ...]) -> Design:
    """The loads and limits that were asked for. Raises UsageError."""
    loads: list[Load] = []
    concurrency = request.concurrency
    if concurrency is None and request.rates is None and request.trace is None:
        concurrency = DEFAULT_CONCURRENCY
    loads += [closed_loop(ids, int(n), request.count) for n in _numbers(concurrency, "--concurrency", whole=True)]
    count = request.count or OPEN_LOOP_REQUESTS
    loads += [poisson(ids, rate, count, request.seed) for rate in _numbers(request.rates, "--rate", whole=False)]
    if request.trace is not None:
        loads.append(read_trace(request.trace, ids))
    limits = None
    if request.ttft_limit is not None or request.itl_limit is not None:
        limits = Limits(ttft_s=request.ttft_limit, itl_s=request.itl_limit, requests=count)
    return Design(loads=tuple(loads), pairs=request.pairs, limits=limits, seed=request.seed, ids=ids)


def _numbers(text: str | None, option: str, *, whole: bool) -> list[float]:
    if text is None:
        return []
    kind = "whole numbers of at least 1" if whole else "numbers above 0"
    found: list[float] = []
    for part in text.split(","):
        try:
            number: float = int(part) if whole else float(part)
        except ValueError:
            number = 0
        if not 0 < number < float("inf"):
            raise UsageError(f"{option} {text!r}: expected {kind} with commas between, found {part!r}")
        if number in found:
            raise UsageError(f"{option} {text!r}: {part} is given twice")
        found.append(number)
    return found


def _arms(adapter: Adapter, request: CostRequest) -> Arms:
    shared = dict(mode_settings(adapter, request.mode, "--mode")) if request.mode is not None else {}
    shared.update(parse_assignments(adapter, request.assignments))
    shown = () if request.shown == ("none",) else request.shown
    return choose_arms(adapter, request.on, request.off, shown, shared, request.slowed)


def _corpus(adapter: Adapter, model: str, name: str) -> Corpus:
    facts = adapter.model_facts(model)
    corpus = retokenise(load_corpus(name), adapter.tokenizer(model))
    check_fits(corpus, facts.vocab_size, facts.max_position_embeddings)
    return corpus


def prepare_folder(folder: Path, *, overwrite: bool) -> None:
    """Makes the folder ready. Raises UsageError for files of others or an earlier measurement, OutputError."""
    if (folder / RECORD).exists() and not overwrite:
        raise UsageError(f"--out {folder}: holds an earlier measurement; choose another folder or pass --overwrite")
    if overwrite:
        for name in FOLDERS:
            shutil.rmtree(folder / name, ignore_errors=True)
        for name in WRITTEN:
            (folder / name).unlink(missing_ok=True)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"--out {folder}: expected a new or empty folder, found other files; choose another")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(f"--out {folder}: cannot be made: {error.strerror}; choose another") from error
