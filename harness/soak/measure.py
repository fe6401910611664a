"""A soak: the same requests served round after round under background traffic, by one server that grows old.

It does not judge; `run_soak` drives an engine, bounded in rounds and in time. Rules: a round's answers are held against
the first round with the same background (drift over time), and those first rounds against each other (drift with load);
latencies of an old server are compared with a new one's over the same rounds; a quantile is a value that was measured,
and one that fewer than ten values lie beyond is left out.
"""

from __future__ import annotations

import dataclasses
import math
import secrets
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from harness.case import Case
from harness.cell import Cell, Control, Requires
from harness.errors import EngineError
from harness.execute import capture_command, case_requests, start_command
from harness.expected import expected_of, missing_from
from harness.lifetime import LifetimeError, LifetimeProcess
from harness.matrix import Matrix
from harness.occupancy import Occupancy, occupancy
from harness.plan import Plan, Subject, make_plan
from harness.store import Store

if TYPE_CHECKING:
    from harness.capture import Capture

SCHEMA = 1
BACKGROUNDS = 4  # seeds of the shape, in turn
BEYOND = 10  # values that must lie beyond a quantile
LEAST_P99 = 1000  # values of which that many lie beyond the p99
QUANTILES = (("p50", 0.5), ("p99", 0.99))


@dataclass(frozen=True, slots=True, kw_only=True)
class SoakRequest:
    """What to soak, and its bounds: whichever of rounds and seconds is reached first ends the old server's life."""

    subject: Subject
    corpus: str
    shape: str
    rounds: int
    seconds: float
    folder: Path
    deadline_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SoakRound:
    """One round: which background, what came back, how long it took, what the process held when it began."""

    background: str
    digest: str
    at_s: float  # since the server's first round
    seconds: float
    resident_kib: int | None
    ttft_s: tuple[float, ...]
    e2e_s: tuple[float, ...]
    occupancy: Occupancy | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Soak:
    """An old server's rounds, and a new one's over the last backgrounds of the old one."""

    old: tuple[SoakRound, ...]
    new: tuple[SoakRound, ...]

    @property
    def drifted(self) -> tuple[int, ...]:
        """Rounds of the old server whose answers are not those of its first round with the same background."""
        first = self._first()
        return tuple(at for at, one in enumerate(self.old) if one.digest != first[one.background])

    @property
    def distinct(self) -> int:
        """Different answers over backgrounds, in the first round of each."""
        return len(set(self._first().values()))

    @property
    def renewed(self) -> tuple[int, ...]:
        """Rounds of the new server whose answers are not the old one's first with the same background."""
        first = self._first()
        return tuple(at for at, one in enumerate(self.new) if one.digest != first[one.background])

    @property
    def growth_kib(self) -> int | None:
        """Memory at the old server's last round minus that half-way: pools are touched for the first time before."""
        sizes = [one.resident_kib for one in self._settled]
        if len(sizes) < 2 or sizes[0] is None or sizes[-1] is None:
            return None
        return sizes[-1] - sizes[0]

    @property
    def _settled(self) -> tuple[SoakRound, ...]:
        """The second half of the old server's life."""
        return self.old[len(self.old) // 2 :]

    @property
    def exit_code(self) -> int:
        """1 if anything moved the answers."""
        return int(bool(self.drifted or self.renewed) or self.distinct > 1)

    @property
    def sentence(self) -> str:
        """The result in words."""
        told = f"{len(self.drifted)} of {len(self.old)} rounds drifted over {self.old[-1].at_s:.0f} s"
        told += f"; {self.distinct} distinct answers over {len(self._first())} backgrounds"
        told += f"; {len(self.renewed)} of {len(self.new)} rounds of a new server differ"
        growth = self.growth_kib
        return f"{told}; memory growth in its second half {'unknown' if growth is None else f'{growth} KiB'}"

    def latencies(self) -> dict[str, dict[str, float | None]]:
        """Quantiles of the old server's last rounds and of as many of the new one's, after its first, and their ratio.

        None: too few values.
        """
        last, warm = self._compared
        result: dict[str, dict[str, float | None]] = {}
        for name in ("ttft_s", "e2e_s"):
            for label, level in QUANTILES:
                old, new = (quantile([v for one in side for v in getattr(one, name)], level) for side in (last, warm))
                ratio = old / new if old is not None and new else None
                result[f"{name.removesuffix('_s')}_{label}"] = {"old_s": old, "new_s": new, "ratio": ratio}
        return result

    @property
    def _compared(self) -> tuple[tuple[SoakRound, ...], tuple[SoakRound, ...]]:
        """The rounds whose latencies are compared, of the old server and of the new one."""
        warm = self.new[1:] or self.new
        return self.old[-len(warm) :], warm

    def to_json(self) -> dict[str, object]:
        """For `soak.json`."""
        return {
            "schema": SCHEMA, "exit_code": self.exit_code, "sentence": self.sentence, "drifted": list(self.drifted),
            "distinct": self.distinct, "renewed": list(self.renewed), "growth_kib": self.growth_kib,
            "growth_kib_per_round": _slope([one.resident_kib for one in self._settled]),
            "latency": self.latencies(), "old": [_round_json(one) for one in self.old],
            "new": [_round_json(one) for one in self.new],
        }  # fmt: skip

    def text(self) -> str:
        """What a terminal shows."""
        lines = [f"{'latency':<10} {'old server':>12} {'new server':>12} {'old / new':>10}"]
        for name, values in self.latencies().items():
            shown = [_shown(values[key], unit) for key, unit in (("old_s", " s"), ("new_s", " s"), ("ratio", ""))]
            lines.append(f"{name:<10} {shown[0]:>12} {shown[1]:>12} {shown[2]:>10}")
        seen = self.old[-1].occupancy
        lines.append(seen.text if seen else "the engine shows no steps")
        answers = min(sum(len(one.e2e_s) for one in side) for side in self._compared)
        if answers < LEAST_P99:
            lines.append(f"p99 needs {LEAST_P99:,} answers of the new server after its first round, there are "
                         f"{answers}: soak for longer, or a larger corpus")  # fmt: skip
        return "\n".join([*lines, self.sentence])

    def _first(self) -> Mapping[str, str]:
        found: dict[str, str] = {}
        for one in self.old:
            found.setdefault(one.background, one.digest)
        return found


def quantile(values: Sequence[float], level: float) -> float | None:
    """The smallest value with at least that share at or below it; None if fewer than BEYOND lie beyond (p50: any)."""
    if not values or (level > 0.5 and len(values) * (1 - level) < BEYOND):
        return None
    return sorted(values)[math.ceil(level * len(values)) - 1]


def run_soak(request: SoakRequest, tell: Callable[[str], None]) -> Soak:
    """Serves, measures, and counts. Raises EngineError with the engine's own words, UsageError."""
    request.folder.mkdir(parents=True, exist_ok=True)
    plan, cases = _plan(request)
    old = _serve(request, plan, cases, request.rounds, "old", tell)
    count = max(BACKGROUNDS, len(old) // 4)
    new = _serve(
        request, plan, [cases[one % len(cases)] for one in range(len(old) - count, len(old))], count, "new", tell
    )
    return Soak(old=old, new=new)


def _plan(request: SoakRequest) -> tuple[Plan, list[Case]]:
    from harness.axis import AXES

    names = tuple(f"{request.shape}:{seed}" for seed in range(1, BACKGROUNDS + 1))
    cell = Cell(
        name="soak", invariant="soak", corpus=request.corpus, rule="tokens", replay="natural", axis=AXES["load"],
        reference="none", variants=names, control=Control(kind="none"), requires=Requires(), schedule="together",
        settings=(), expect=None, model=None, minimum=1,
    )  # fmt: skip
    matrix = Matrix(name="soak", path=Path("soak"), cells=(cell,), allow_unsupported=(), digest="")
    plan = make_plan(matrix, request.subject)
    for pair in plan.pairs:
        if pair.varied is None:
            raise EngineError(f"soak: {pair.unsupported}")
    return plan, [plan.cases[pair.varied] for pair in plan.pairs if pair.varied is not None]


def _serve(
    request: SoakRequest, plan: Plan, cases: Sequence[Case], rounds: int, name: str, tell: Callable[[str], None]
) -> tuple[SoakRound, ...]:
    adapter, store = request.subject.adapter, Store(request.folder / "captures")
    session, found, lifetime = secrets.token_hex(8), [], cases[0].lifetime
    try:
        with LifetimeProcess(adapter.environment(dict(lifetime.settings)), request.folder / f"{name}.log") as process:
            process.ask(start_command(lifetime, store, session), request.deadline_s)
            begun = time.monotonic()
            for number in range(rounds):
                case = dataclasses.replace(cases[number % len(cases)], repetition=number)
                process.ask(capture_command(plan, case, {}, None), request.deadline_s)
                at = time.monotonic() - begun
                found.append(_round(plan, case, store.read(case.id), at))
                store.remove(case.id)
                tell(f"{name} server, round {number + 1}, {at:.0f} s, {found[-1].resident_kib} KiB")
                if at >= request.seconds and len(found) > BACKGROUNDS:
                    break
    except LifetimeError as error:
        raise EngineError("\n".join([error.failure.message, *error.failure.log_tail])) from error
    return tuple(found)


def _round(plan: Plan, case: Case, capture: Capture, at_s: float) -> SoakRound:
    missing = missing_from(
        capture.traces, expected_of(case_requests(plan, case), case.requests, case.schedule)
    )  # fmt: skip
    if missing:
        raise EngineError(f"round {case.repetition}: {'; '.join(missing)}")
    from harness.capture import RESIDENT

    table = capture.traces.requests
    memory = next((field.value for field in capture.subject if field.name == RESIDENT), None)
    return SoakRound(
        background=case.companions[0] if case.companions else "none", digest=capture.judged_digest, at_s=at_s,
        seconds=capture.seconds, resident_kib=memory if isinstance(memory, int) else None,
        ttft_s=tuple((table.first_token_s - table.arrival_s).tolist()),
        e2e_s=tuple((table.finish_s - table.arrival_s).tolist()), occupancy=occupancy([capture.traces]),
    )  # fmt: skip


def _slope(values: Sequence[int | None]) -> float | None:
    known = [value for value in values if value is not None]
    if len(known) < 3:
        return None
    return statistics.linear_regression(range(len(known)), known).slope


def _round_json(one: SoakRound) -> dict[str, object]:
    return {
        "background": one.background, "judged_digest": one.digest, "at_s": round(one.at_s, 3),
        "seconds": round(one.seconds, 4), "resident_kib": one.resident_kib,
        "occupancy": None if one.occupancy is None else one.occupancy.to_json(),
    }  # fmt: skip


def _shown(value: float | None, unit: str) -> str:
    return "too few" if value is None else f"{value:.4g}{unit}"
