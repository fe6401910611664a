"""Runs a plan's cases in child processes and keeps what they produce. The only module that causes captures.

It does not know cells or verdicts. Rules: every planned case ends as a stored capture or a Failure; a dead process
costs one case, the rest go on in a new one; a stored capture is reused only while the identity fingerprint still
matches, and the two captures of a floor only together.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from harness.canonical import digest
from harness.case import Case, Lifetime
from harness.corpus import take
from harness.corpus.json_lines import request_json
from harness.engine import Adapter, Field
from harness.errors import StoreError
from harness.lifetime import Event, Failure, LifetimeError, LifetimeProcess
from harness.plan import Plan, companion_id
from harness.prelude import RESTORED, build_prelude
from harness.progress import Progress
from harness.request import Request
from harness.schedules import companion_source
from harness.settings import Settings
from harness.stages import Stage
from harness.store import Store, subject_fields


@dataclass(slots=True, kw_only=True)
class Execution:
    """What running a plan came to. Seconds are wall-clock time with an engine process alive."""

    failures: dict[str, Failure] = field(default_factory=dict)
    reused: set[str] = field(default_factory=set)
    worker_seconds: float = 0.0


class Executor:
    """Runs stages one after another; one engine process at a time."""

    def __init__(
        self, plan: Plan, adapter: Adapter, folder: Path, session: str, progress: Progress, deadline_s: float
    ) -> None:
        self.plan = plan
        self.adapter = adapter
        self.folder = folder
        self.store = Store(folder / "captures")
        self.session = session
        self.progress = progress
        self.deadline_s = deadline_s
        self.result = Execution()

    def run(self) -> Execution:
        """Runs what is not stored yet. KeyboardInterrupt leaves the store whole and no process behind."""
        self.progress.begin(len(self.plan.cases), sum(planned_tokens(self.plan, case) for case in self.plan.cases))
        try:
            for number, stage in enumerate(self.plan.stages):
                self._stage(number, stage)
        finally:
            self.progress.end()
        return self.result

    def _stage(self, number: int, stage: Stage) -> None:
        pending = [case for case in stage.cases if not self._captured_now(case)]
        attempt = 0
        while pending:
            log = self.folder / "logs" / f"{number:02d}-{stage.lifetime.id}-{attempt}.log"
            begun = time.monotonic()
            environment = self.adapter.environment(dict(stage.lifetime.settings))
            try:
                self._save_caches(stage, pending, environment)
                with LifetimeProcess(environment, log) as process:
                    self._lifetime(process, stage, pending)
            except LifetimeError as error:  # the engine did not start
                self.result.failures.update(dict.fromkeys(pending, error.failure))
            self.result.worker_seconds += time.monotonic() - begun
            pending = self._remaining(stage)
            attempt += 1

    def _save_caches(self, stage: Stage, pending: Sequence[str], environment: Mapping[str, str]) -> None:
        """An engine process of its own for each case that is to restore what another process has cached."""
        for case_id in pending:
            case = self.plan.cases[case_id]
            if case.prelude is None or case.prelude[0] != RESTORED:
                continue
            requests = [request_json(request) for request in prelude_requests(self.plan, case)]
            with LifetimeProcess(environment, self.folder / "logs" / f"cache-{case_id}.log") as process:
                self._start(process, stage)
                process.ask({"do": "save", "prelude": requests, "cache": str(self._cache(case_id))}, self.deadline_s)

    def _cache(self, case: str) -> Path:
        return (self.folder / "caches" / case).resolve()

    def _start(self, process: LifetimeProcess, stage: Stage) -> Event:
        return process.ask(start_command(stage.lifetime, self.store, self.session), self.deadline_s)

    def _lifetime(self, process: LifetimeProcess, stage: Stage, pending: Sequence[str]) -> None:
        started = self._start(process, stage)
        for case in self._after_reuse(pending, identity_digest(_started_fields(started))):
            try:
                self._case(process, case)
            except LifetimeError as error:
                self.result.failures[case] = error.failure
                if error.dead:
                    return

    def _case(self, process: LifetimeProcess, case_id: str) -> None:
        case = self.plan.cases[case_id]
        forced = self._forced(case)
        if isinstance(forced, Failure):
            self.result.failures[case_id] = forced
            return
        requests = case_requests(self.plan, case)
        tokens = planned_tokens(self.plan, case_id)
        name = f"{case.schedule.name} {case.replay} {describe(case, self.plan.settings)}".rstrip()
        self.progress.case(name, len(requests), tokens)
        cache = str(self._cache(case_id)) if case.prelude and case.prelude[0] == RESTORED else None
        command = capture_command(self.plan, case, forced, cache)
        event = process.ask(command, self.deadline_s, self._advance)
        self.progress.done(tokens, float(str(event["seconds"])))

    def _advance(self, event: Event) -> None:
        self.progress.advance(int(str(event["requests"])), int(str(event["tokens"])))

    def _forced(self, case: Case) -> dict[str, list[int]] | Failure:
        if case.golden is None:
            return {}
        failure = self.result.failures.get(case.golden)
        if failure is not None:
            return dataclasses.replace(
                failure, message=f"the case to be forced along has no capture: {failure.message}"
            )
        traces = self.store.read(case.golden).traces
        tokens: dict[str, list[int]] = {}
        end = 0
        for row, request in enumerate(traces.requests.id):
            begin, end = end, end + int(traces.requests.length[row])
            if not traces.requests.companion[row]:
                tokens[request] = traces.positions.token[begin:end].tolist()
        return tokens

    def _captured_now(self, case: str) -> bool:
        """Whether this very session has captured the case already; a damaged header is of no session."""
        try:
            return self.store.has(case) and self._header_session(case) == self.session
        except StoreError:
            return False

    def _header_session(self, case: str) -> object:
        capture = self.store.header(case)["capture"]
        return capture.get("session") if isinstance(capture, Mapping) else None

    def _after_reuse(self, pending: Sequence[str], identity: str) -> list[str]:
        """What must be captured: everything but stored captures of the same identity, floors only whole."""
        kept = {case for case in pending if self._reusable(case, identity)}
        groups: dict[str, list[str]] = {}
        for case in pending:
            groups.setdefault(floor_group(self.plan.cases[case]), []).append(case)
        rest = []
        for members in groups.values():
            if all(case in kept for case in members):
                self.result.reused.update(members)
            else:
                rest += members
        for case in rest:
            self.store.remove(case)
        return [case for case in pending if case in rest]

    def _reusable(self, case: str, identity: str) -> bool:
        if not self.store.has(case):
            return False
        try:
            self.store.read(case)
            return identity_digest(subject_fields(self.store.header(case))) == identity
        except StoreError as error:
            self.progress.note(f"stored capture is captured again: {error}")
            return False

    def _remaining(self, stage: Stage) -> list[str]:
        """Cases that a dead process left, with the other half of each broken floor."""
        failed = self.result.failures
        missing = [case for case in stage.cases if not self.store.has(case) and case not in failed]
        groups = {floor_group(self.plan.cases[case]) for case in missing}
        return [case for case in stage.cases if case not in failed and floor_group(self.plan.cases[case]) in groups]


def capture_command(plan: Plan, case: Case, forced: Mapping[str, list[int]], cache: str | None) -> dict[str, object]:
    """What an engine process is told to run; `cache` is the folder of a prefix cache to restore."""
    return {
        "do": "capture", "case": case.id, "requests": [request_json(one) for one in case_requests(plan, case)],
        "schedule": dataclasses.asdict(case.schedule), "replay": case.replay, "golden": forced,
        "logits_digests": case.logits_digests, "work": work_fields(case),
        "prelude": [request_json(one) for one in prelude_requests(plan, case)], "cache": cache,
        "reset": case.lifetime.resets,
    }  # fmt: skip


def start_command(lifetime: Lifetime, store: Store, session: str) -> dict[str, object]:
    """What an engine process is told first."""
    return {
        "do": "start", "engine": lifetime.engine, "model": lifetime.model, "settings": dict(lifetime.settings),
        "store": str(store.folder.resolve()), "session": session,
    }  # fmt: skip


def floor_group(case: Case) -> str:
    """The same for the two captures of a floor."""
    return digest(dataclasses.replace(case, repetition=0))


def identity_digest(fields: Sequence[Field]) -> str:
    """SHA-256 over the identity fields of an engine process, without the work it was given."""
    rows = [(f.name, f.value) for f in fields if f.field_class == "identity" and not f.name.startswith("work.")]
    return digest(sorted(rows, key=lambda row: row[0]))


def _started_fields(event: Event) -> list[Field]:
    rows = event["subject"]
    return [Field(**row) for row in rows] if isinstance(rows, list) else []


def work_fields(case: Case) -> dict[str, str]:
    """What the harness fixes of a case, as fingerprint values."""
    return {
        "corpus": case.corpus_digest,
        "requests": digest(case.requests),
        "schedule": digest(case.schedule),
        "companions": digest(case.companions),
        "prelude": digest(case.prelude),
        "sampling": f"seed offset {case.seed_offset}",
    }


def case_requests(plan: Plan, case: Case) -> tuple[Request, ...]:
    """The judged requests of a case, seeds offset, and its companions under their own ids."""
    model = case.lifetime.model
    judged = take(plan.corpora[model, case.corpus], case.requests).requests
    requests = tuple(_offset(request, case.seed_offset) for request in judged)
    if case.companions is None:
        return requests
    name, _, count = case.companions
    companions = take(plan.corpora[model, name], count).requests
    return requests + tuple(dataclasses.replace(r, id=companion_id(name, r.id)) for r in companions)


def prelude_requests(plan: Plan, case: Case) -> tuple[Request, ...]:
    """What the engine serves just before the case; empty without a prelude."""
    if case.prelude is None:
        return ()
    model, kind = case.lifetime.model, case.prelude[0]
    source = companion_source(kind)
    other = take(plan.corpora[model, source[0]], source[1]).requests if source else ()
    return build_prelude(kind, take(plan.corpora[model, case.corpus], case.requests).requests, other)


def _offset(request: Request, offset: int) -> Request:
    seed = request.sampling.seed
    if seed is None or not offset:
        return request
    return dataclasses.replace(request, sampling=dataclasses.replace(request.sampling, seed=(seed + offset) % 2**64))


def planned_tokens(plan: Plan, case_id: str) -> int:
    """Tokens a case generates at most."""
    case = plan.cases[case_id]
    return sum(request.sampling.max_tokens * request.sampling.n for request in case_requests(plan, case))


def describe(case: Case, base: Settings = ()) -> str:
    """What tells this case's configuration apart: settings that differ from `base` (all of them without one)."""
    usual = dict(base)
    changed = [f"{name}={value}" for name, value in case.lifetime.settings if usual.get(name) != value]
    return " ".join([*changed, *(["restarted"] if case.lifetime.ordinal else [])])
