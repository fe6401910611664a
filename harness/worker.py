"""The child process: one engine lifetime. Reads commands from standard input, answers on a pipe of its own.

It does not know cells or verdicts. Rules: anything printed goes to the log, never into an answer; one command, one
answer; when the parent is gone it ends itself; the broad `except` of the code base stands here, at the engine's edge,
and turns whatever happens into an answer.

Commands and answers are JSON, one per line; captures go to the store as Parquet.
"""

from __future__ import annotations

import json
import os
import secrets
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TextIO, cast

from harness.canonical import digest
from harness.capture import CACHE_AS_LEFT, CACHE_EMPTIED, CACHE_STATE, NOTHING_SERVED, RESIDENT, Capture
from harness.corpus.json_lines import MAX_TOKEN_ID, read_request
from harness.digest import judged_digest
from harness.engine import Adapter, Engine, Field, KeepsCache, NamesItsCaches, ResetsCache, Scalar, Work
from harness.errors import EngineDied, EngineError, SamebitsError, Unsupported
from harness.fingerprint.host import host_fields
from harness.fingerprint.privacy import public_field
from harness.registry import adapter
from harness.request import Request
from harness.schedule import Arrival, Schedule
from harness.schedules import build_schedule
from harness.store import Store
from harness.strict_json import Place, raise_mistakes

PARENT_CHECK_S = 1.0
PROGRESS_S = 0.2


@dataclass(slots=True, kw_only=True)
class Lifetime:
    """The running engine and what every capture of this process shares."""

    adapter: Adapter
    engine: Engine
    requested: Mapping[str, Scalar]
    store: Store
    session: str
    nonce: str
    served: list[str]
    emptied: bool = False  # the prefix cache, before the work at hand


def main() -> int:
    """Serves commands until standard input ends."""
    answers = os.fdopen(int(sys.argv[1]), "w", encoding="utf-8")
    threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()
    lifetime: Lifetime | None = None
    for line in sys.stdin:
        command = json.loads(line)
        try:
            if command["do"] == "start":
                lifetime = _start(command)
                _answer(answers, _started(lifetime))
            elif command["do"] == "capture" and lifetime is not None:
                _answer(answers, _capture(lifetime, command, answers))
            elif command["do"] == "save" and lifetime is not None:
                _answer(answers, _save_cache(lifetime, command))
            elif command["do"] == "time" and lifetime is not None:
                _answer(answers, _time(lifetime, command))
        except Unsupported as error:
            _answer(answers, {"event": "failed", "kind": "unsupported", "message": str(error)})
        except EngineDied as error:
            traceback.print_exception(error.__cause__ or error)
            _answer(answers, {"event": "failed", "kind": "error", "message": str(error), "dead": True})
            os._exit(1)  # what failed in the middle may hold threads and processes that never end
        except Exception as error:  # noqa: BLE001 - the engine boundary: whatever it raises becomes an ERROR verdict
            traceback.print_exc()
            message = str(error) if isinstance(error, SamebitsError) else f"{type(error).__name__}: {error}"
            _answer(answers, {"event": "failed", "kind": "error", "message": message})
    if lifetime is not None:
        lifetime.engine.stop()
    return 0


def _end_with_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(PARENT_CHECK_S)
    os._exit(1)


def _answer(answers: TextIO, event: Mapping[str, object]) -> None:
    answers.write(json.dumps(event) + "\n")
    answers.flush()


def _start(command: Mapping[str, object]) -> Lifetime:
    engine_adapter = adapter(cast("str", command["engine"]))
    requested = cast("Mapping[str, Scalar]", command["settings"])
    engine = engine_adapter.start(cast("str", command["model"]), requested)
    return Lifetime(
        adapter=engine_adapter, engine=engine, requested=requested, store=Store(Path(cast("str", command["store"]))),
        session=cast("str", command["session"]), nonce=secrets.token_hex(16), served=[],
    )  # fmt: skip


def _started(lifetime: Lifetime) -> dict[str, object]:
    fields = [_field_json(field) for field in _subject(lifetime, None)]
    return {"event": "started", "resolved": dict(lifetime.engine.resolved()),
            "observed": dict(lifetime.engine.observed()), "subject": fields}  # fmt: skip


def _field_json(field: Field) -> dict[str, object]:
    return {
        "name": field.name,
        "value": field.value,
        "field_class": field.field_class,
        "source": field.source,
    }


def _subject(lifetime: Lifetime, work: Mapping[str, str] | None) -> tuple[Field, ...]:
    """The subject's fingerprint: engine, configuration, this process's host, and the work it was given."""
    host = host_fields(os.environ, now=datetime.now(UTC))
    fields = [*lifetime.engine.fingerprint(), *_with_caches(host, lifetime.engine)]
    for key, value in lifetime.requested.items():
        fields.append(Field(name=f"config.{key}", value=value, field_class="identity", source="requested"))
    for key, value in lifetime.engine.resolved().items():
        fields.append(
            Field(name=f"resolved.{key}", value=value, field_class="identity", source="resolved by the engine")
        )
    for key, value in lifetime.engine.observed().items():
        fields.append(
            Field(name=f"observed.{key}", value=value, field_class="context", source="observed in the engine")
        )
    for key, value in (work or {}).items():
        fields.append(Field(name=f"work.{key}", value=value, field_class="identity", source="plan"))
    served = digest(lifetime.served) if lifetime.served else NOTHING_SERVED
    fields.append(Field(name="lineage.served", value=served, field_class="lineage", source="works served before"))
    cache = CACHE_EMPTIED if lifetime.emptied else CACHE_AS_LEFT
    memory = _resident_kib()
    where = "/proc/self/statm" if memory else "no /proc/self/statm here"
    fields.append(Field(name=RESIDENT, value=memory, field_class="context", source=where))
    fields.append(Field(name=CACHE_STATE, value=cache, field_class="lineage", source="worker"))
    return tuple(sorted((public_field(field) for field in fields), key=lambda field: field.name))


def _with_caches(host: tuple[Field, ...], engine: Engine) -> tuple[Field, ...]:
    """The host's fields; a cache that cannot decide what the engine computes is lineage."""
    if not isinstance(engine, NamesItsCaches):
        return host
    deciding = engine.deciding_caches()
    return tuple(
        replace(field, field_class="lineage", source=f"{field.source}; decides nothing in this engine")
        if field.name.startswith("cache.") and field.name not in deciding
        else field
        for field in host
    )


def _resident_kib() -> int | None:
    """Memory this process holds now."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    except OSError:
        return None
    return pages * os.sysconf("SC_PAGE_SIZE") // 1024


def _capture(lifetime: Lifetime, command: Mapping[str, object], answers: TextIO) -> dict[str, object]:
    case = cast("str", command["case"])
    work = _work(command)
    lifetime.emptied = command["reset"] is True
    if lifetime.emptied:
        _reset_cache(lifetime)
    if command["cache"] is None:
        _serve_prelude(lifetime, command)
    else:
        _restore_cache(lifetime, command)
    subject = _subject(lifetime, cast("Mapping[str, str]", command["work"]))
    begun = time.perf_counter()
    traces = lifetime.engine.generate(work, _Progress(answers, case))
    seconds = time.perf_counter() - begun
    capture = Capture(
        case=case, traces=traces, requested=lifetime.requested, resolved=lifetime.engine.resolved(),
        observed=lifetime.engine.observed(), subject=subject, process_nonce=lifetime.nonce,
        repetition_nonce=secrets.token_hex(16), session=lifetime.session, judged_digest=judged_digest(traces),
        seconds=seconds,
    )  # fmt: skip
    lifetime.store.write(capture)
    lifetime.served.append(case)
    return {"event": "captured", "case": case, "seconds": seconds}


def _serve_prelude(lifetime: Lifetime, command: Mapping[str, object]) -> None:
    """Serves what the case wants served before, all together, and forgets the answers."""
    requests = _requests(command["prelude"])
    if not requests:
        return
    schedule = build_schedule("together", [request.id for request in requests])
    work = Work(requests=requests, schedule=schedule, replay="natural", golden={}, logits_digests=False)
    lifetime.engine.generate(work, lambda _requests, _tokens: None)
    lifetime.served.append(digest(requests))


def _save_cache(lifetime: Lifetime, command: Mapping[str, object]) -> dict[str, object]:
    """Serves the prelude and leaves the prefix cache behind for another process."""
    _serve_prelude(lifetime, command)
    _cache_of(lifetime).save_cache(Path(cast("str", command["cache"])))
    return {"event": "saved"}


def _time(lifetime: Lifetime, command: Mapping[str, object]) -> dict[str, object]:
    """Serves a load by the clock."""
    from harness.cost.serve import serve_timed

    requests = _requests(command["requests"])
    answer = serve_timed(lifetime.engine, requests, command)
    lifetime.served.append(digest(["by the clock", command["load"]]))
    return answer


def _restore_cache(lifetime: Lifetime, command: Mapping[str, object]) -> None:
    """Reads what another process left behind; it counts as served, though not by this one."""
    _cache_of(lifetime).restore_cache(Path(cast("str", command["cache"])))
    lifetime.served.append(digest(["restored", digest(_requests(command["prelude"]))]))


def _reset_cache(lifetime: Lifetime) -> None:
    """Empties the prefix cache; what was served before stays on record."""
    if not isinstance(lifetime.engine, ResetsCache):
        raise Unsupported(f"engine {lifetime.adapter.name!r} cannot empty its prefix cache")
    lifetime.engine.reset_cache()
    lifetime.emptied = True


def _cache_of(lifetime: Lifetime) -> KeepsCache:
    if not isinstance(lifetime.engine, KeepsCache):
        raise Unsupported(f"engine {lifetime.adapter.name!r} cannot save or restore a prefix cache")
    return lifetime.engine


class _Progress:
    """Sends progress at most every PROGRESS_S seconds."""

    def __init__(self, answers: TextIO, case: str) -> None:
        self.answers, self.case, self.last = answers, case, 0.0

    def __call__(self, requests: int, tokens: int) -> None:
        now = time.monotonic()
        if now - self.last >= PROGRESS_S:
            self.last = now
            _answer(self.answers, {"event": "progress", "case": self.case, "requests": requests, "tokens": tokens})


def _work(command: Mapping[str, object]) -> Work:
    schedule = cast("Mapping[str, object]", command["schedule"])
    arrivals = cast("list[Mapping[str, object]]", schedule["arrivals"])
    golden = cast("Mapping[str, list[int]]", command["golden"])
    if command["replay"] not in ("natural", "golden"):
        raise EngineError(f"replay {command['replay']!r}: expected natural or golden")
    return Work(
        requests=_requests(command["requests"]),
        schedule=Schedule(
            name=cast("str", schedule["name"]),
            arrivals=tuple(Arrival(**cast("dict[str, object]", item)) for item in arrivals),  # type: ignore[arg-type]
        ),
        replay=command["replay"],
        golden={key: tuple(value) for key, value in golden.items()},
        logits_digests=command["logits_digests"] is True,
    )


def _requests(items: object) -> tuple[Request, ...]:
    place = Place(file="command", line=0, path="$.requests", mistakes=[])
    requests = tuple(
        read_request(place.at(index), item, vocab_size=MAX_TOKEN_ID + 1)
        for index, item in enumerate(cast("list[object]", items))
    )
    raise_mistakes("requests from the harness", place.mistakes)
    return requests


if __name__ == "__main__":
    sys.exit(main())
