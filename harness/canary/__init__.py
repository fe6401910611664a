"""A canary: how often an endpoint that cannot be exact says the same, in numbers. Pure, but for `run_canary`.

It does not know engines. Rules: it measures and never passes: a share of equal answers is no proof that the next one
will be equal, so its best verdict is INSUFFICIENT with numbers; a share comes with its Wilson interval; what differs
is told from the most frequent answer, with the margin at which the first difference was decided.

Source of the interval: Wilson, "Probable inference, the law of succession, and statistical inference", 1927.
"""

from __future__ import annotations

import math
import secrets
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from harness.case import Case, Lifetime
from harness.corpus import check_fits, load_corpus, retokenise
from harness.engine import Adapter, Scalar
from harness.errors import EngineError
from harness.matrix import Matrix
from harness.schedules import build_schedule
from harness.settings import resolve
from harness.stages import order_stages

if TYPE_CHECKING:
    from harness.judged import RequestKey
    from harness.plan import Plan
    from harness.progress import Progress
    from harness.traces import Traces

SCHEMA = 1
Z_95 = 1.959963984540054  # two-sided 95 % of the normal distribution
FORTHRIGHT = "a canary measures and cannot pass"
Completion = tuple[tuple[int, ...], str]  # token ids and finish reason


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """`count` of `total`, with the 95 % Wilson interval."""

    count: int
    total: int

    @property
    def interval(self) -> tuple[float, float]:
        """Lower and upper bound, within 0 and 1. Raises ZeroDivisionError for a total of 0."""
        n, p = self.total, self.count / self.total
        centre = (p + Z_95**2 / (2 * n)) / (1 + Z_95**2 / n)
        half = Z_95 / (1 + Z_95**2 / n) * math.sqrt(p * (1 - p) / n + Z_95**2 / (4 * n**2))
        return max(0.0, centre - half), min(1.0, centre + half)

    def text(self) -> str:
        """`19/20 (0.95, interval 0.76 to 0.99)`."""
        low, high = self.interval
        return f"{self.count}/{self.total} ({self.count / self.total:.2f}, interval {low:.2f} to {high:.2f})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Repeated:
    """One request, answered many times. `position` is where an answer first left the most frequent one, None: never.

    `gap` is the distance in nats of the two best candidates there, None where no candidates are known.
    """

    request: str
    modal: Share
    distinct: int
    position: int | None
    gap: float | None
    margin: str  # a tie class of `harness.compare.divergence`, "" where nothing differs
    completion: Completion  # the most frequent one


def count_repeats(captures: Sequence[Traces]) -> tuple[Repeated, ...]:
    """What each request's answers came to, over captures of the same requests. Raises ComparisonError."""
    from harness.judged import find_judged

    found = [find_judged(traces) for traces in captures]
    return tuple(count_answers(_said_of(key), [(t, j.keys.index(key)) for t, j in zip(captures, found, strict=True)])
                 for key in found[0].keys)  # fmt: skip


def _said_of(key: RequestKey) -> str:
    return key.id if key.sample == 0 else f"{key.id} sample {key.sample}"


def count_answers(name: str, rows: Sequence[tuple[Traces, int]]) -> Repeated:
    """What the answers of one request came to; a row is a capture and the place of an answer among its judged ones."""
    said = [read_completion(traces, j) for traces, j in rows]
    modal, count = Counter(said).most_common(1)[0]
    places = [_first_difference(modal[0], other[0]) for other in said if other != modal]
    position = min(places, default=None)
    gap = None if position is None else _gap(*rows[said.index(modal)], position)
    return Repeated(
        request=name, modal=Share(count=count, total=len(said)), distinct=len(set(said)), position=position, gap=gap,
        margin="" if position is None else _margin(gap), completion=modal,
    )  # fmt: skip


def read_completion(traces: Traces, j: int) -> Completion:
    """The tokens and the finish reason of a capture's judged answer j."""
    from harness.judged import find_judged

    judged = find_judged(traces)
    begin, length = int(judged.starts[j]), int(judged.lengths[j])
    tokens = traces.positions.token[begin : begin + length].tolist()
    return tuple(tokens), traces.requests.finish_reason[int(judged.rows[j])]


def _first_difference(a: Sequence[int], b: Sequence[int]) -> int:
    """The first position at which they differ; the shorter one's end where it is a beginning of the other."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _gap(traces: Traces, j: int, position: int) -> float | None:
    from harness.judged import find_judged

    values, judged = traces.positions.topk_logprobs, find_judged(traces)
    if values is None or values.shape[1] < 2 or position >= int(judged.lengths[j]):
        return None
    row = values[int(judged.starts[j]) + position]
    gap = float(row[0]) - float(row[1])
    return gap if math.isfinite(gap) else None


def _margin(gap: float | None) -> str:
    from harness.compare.divergence import tie_class

    return tie_class(gap)


@dataclass(frozen=True, slots=True, kw_only=True)
class Canary:
    """What a canary found: each request repeated, and the same for the other arm where there is one."""

    corpus: str
    repeats: int
    here: tuple[Repeated, ...]
    there: tuple[Repeated, ...] = ()  # the arm of --variant; empty without one
    caps: tuple[str, ...] = ()

    @property
    def pooled(self) -> Share:
        """Answers equal to their request's most frequent one."""
        return Share(count=sum(one.modal.count for one in self.here), total=sum(one.modal.total for one in self.here))

    @property
    def agreeing(self) -> Share | None:
        """Requests whose most frequent answers are the same in both arms."""
        if not self.there:
            return None
        same = sum(a.completion == b.completion for a, b in zip(self.here, self.there, strict=True))
        return Share(count=same, total=len(self.here))

    @property
    def sentence(self) -> str:
        """The verdict in words."""
        varied = sum(one.distinct > 1 for one in self.here)
        text = f"INSUFFICIENT: {varied} of {len(self.here)} requests gave more than one answer in {self.repeats}"
        text += f"; equal to the most frequent: {self.pooled.text()}"
        if self.agreeing is not None:
            text += f"; most frequent answers agree between the arms: {self.agreeing.text()}"
        return f"{text}; {FORTHRIGHT}"

    def to_json(self) -> dict[str, object]:
        """For `canary.json`."""
        agreeing = self.agreeing
        return {
            "schema": SCHEMA, "verdict": "INSUFFICIENT", "sentence": self.sentence, "corpus": self.corpus,
            "repeats": self.repeats, "caps": list(self.caps), "pooled": _share_json(self.pooled),
            "agreeing": None if agreeing is None else _share_json(agreeing),
            "requests": [_repeated_json(one) for one in self.here],
            "variant": [_repeated_json(one) for one in self.there],
        }  # fmt: skip

    def text(self) -> str:
        """One line per request, then the verdict."""
        lines = [f"{'request':<24} {'modal share':<38} distinct  first divergence"]
        for name, arm in (("", self.here), ("variant: ", self.there)):
            lines += [
                f"{name + one.request:<24} {one.modal.text():<38} {one.distinct:>8}  {_where(one)}" for one in arm
            ]
        return "\n".join([*lines, *(f"! {cap}" for cap in self.caps), self.sentence])


def _where(one: Repeated) -> str:
    if one.position is None:
        return "never"
    return f"position {one.position}, {one.margin}" + ("" if one.gap is None else f" (gap {one.gap:.3g} nats)")


def _share_json(share: Share) -> dict[str, object]:
    return {"count": share.count, "total": share.total, "interval": list(share.interval)}


def _repeated_json(one: Repeated) -> dict[str, object]:
    return {"request": one.request, "modal": _share_json(one.modal), "distinct": one.distinct,
            "first_divergence": one.position, "gap": one.gap, "margin": one.margin}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class CanaryRequest:
    """What to repeat. `variant` is what the other arm changes; empty: one arm."""

    adapter: Adapter
    model: str
    overrides: Mapping[str, Scalar]
    variant: Mapping[str, Scalar]
    corpus: str
    repeats: int
    folder: Path
    deadline_s: float


def run_canary(request: CanaryRequest, progress: Progress) -> Canary:
    """Asks and counts. Raises EngineError for the first case that failed; UsageError."""
    from harness.execute import Executor
    from harness.limits import stated_limits

    plan, arms = _plan(request)
    executor = Executor(plan, request.adapter, request.folder, secrets.token_hex(8), progress, request.deadline_s)
    execution = executor.run()
    for failure in execution.failures.values():
        raise EngineError("\n".join([failure.message, *failure.log_tail]))
    captures = [[executor.store.read(case) for case in arm] for arm in arms]
    repeated = [count_repeats([capture.traces for capture in arm]) for arm in captures]
    caps = stated_limits([capture for arm in captures for capture in arm], company=False)
    return Canary(
        corpus=request.corpus, repeats=request.repeats, here=repeated[0],
        there=repeated[1] if len(repeated) > 1 else (), caps=caps,
    )  # fmt: skip


def _plan(request: CanaryRequest) -> tuple[Plan, list[list[str]]]:
    """A plan without pairs: one case per repetition and arm."""
    from harness.plan import Plan

    adapter, model = request.adapter, request.model
    facts = adapter.model_facts(model)
    corpus = retokenise(load_corpus(request.corpus), adapter.tokenizer(model))
    check_fits(corpus, facts.vocab_size, facts.max_position_embeddings)
    ids = tuple(one.id for one in corpus.requests)
    base = resolve(adapter, [("--set", request.overrides)])
    layers = [base] + (
        [resolve(adapter, [("--set", request.overrides), ("--variant", request.variant)])] if request.variant else []
    )
    cases: dict[str, Case] = {}
    arms: list[list[str]] = []
    for settings in layers:
        lifetime = Lifetime(engine=adapter.name, model=model, settings=settings, ordinal=0)
        arm = [
            Case(
                lifetime=lifetime, corpus=request.corpus, corpus_digest=corpus.digest, requests=ids, companions=None,
                schedule=build_schedule("together", ids), prelude=None, replay="natural", golden=None,
                repetition=repetition, seed_offset=0, logits_digests=False,
            )
            for repetition in range(request.repeats)
        ]  # fmt: skip
        cases |= {case.id: case for case in arm}
        arms.append([case.id for case in arm])
    matrix = Matrix(name="canary", path=Path("canary"), cells=(), allow_unsupported=(), digest="")
    plan = Plan(
        matrix=matrix, engine=adapter.name, model=model, settings=base, pairs=(), cases=cases,
        stages=order_stages(cases), corpora={(model, request.corpus): corpus},
    )  # fmt: skip
    return plan, arms
