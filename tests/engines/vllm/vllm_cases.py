"""Drives one vLLM process as the executor does, and reads back what it stored."""

import dataclasses
import itertools

from engines.vllm_local import VllmAdapter
from harness.corpus.json_lines import request_json
from harness.cost.load import closed_loop, load_json
from harness.cost.timing import read_timings
from harness.lifetime import LifetimeProcess
from harness.schedules import build_schedule
from harness.store import Store

DEADLINE_S = 300.0


class Process:
    """A started engine; `capture` runs requests and returns their traces."""

    def __init__(self, folder, model, settings):
        self.folder, self.model, self.settings = folder, model, settings
        self.store, self.numbers = Store(folder / "captures"), itertools.count()

    def __enter__(self):
        self.process = LifetimeProcess(VllmAdapter().environment(self.settings), self.folder / "log").__enter__()
        self.started = self.process.ask(
            {"do": "start", "engine": "vllm", "model": self.model, "settings": self.settings,
             "store": str(self.store.folder), "session": "tests"}, DEADLINE_S,
        )  # fmt: skip
        return self

    def __exit__(self, *error):
        self.process.__exit__(*error)

    def capture(self, requests, schedule="together", golden=None, companions=(), reset=False):
        """The stored capture of one work."""
        case = f"{next(self.numbers):016x}"
        judged = [request.id for request in requests if request.id not in companions]
        built = build_schedule(schedule, judged, companions, cancelled=bool(companions))
        self.process.ask(
            {"do": "capture", "case": case, "requests": [request_json(request) for request in requests],
             "schedule": dataclasses.asdict(built), "replay": "golden" if golden else "natural",
             "golden": golden or {}, "logits_digests": False, "work": {}, "prelude": [], "cache": None,
             "reset": reset}, DEADLINE_S,
        )  # fmt: skip
        return self.store.read(case)

    def serve(self, requests, concurrency, count):
        """Timings of a closed loop over the requests."""
        file = self.folder / f"timings-{next(self.numbers)}.parquet"
        load = closed_loop([request.id for request in requests], concurrency, count)
        event = self.process.ask(
            {"do": "time", "requests": [request_json(request) for request in requests], "load": load_json(load),
             "slowed": 1.0, "file": str(file)}, DEADLINE_S,
        )  # fmt: skip
        return read_timings(file, str(event["sha256"]))


def with_sampling(request, **fields):
    """The request with other sampling fields."""
    return dataclasses.replace(request, sampling=dataclasses.replace(request.sampling, **fields))
