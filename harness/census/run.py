"""Runs a census on an engine: a plan without pairs, one case per round, all in one engine process.

It does not count. Rules: whatever a round lacks is an error; nothing is asked twice.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.case import Case, Lifetime
from harness.census import count_census
from harness.census.record import census_record
from harness.census.rounds import Design, Round, build_rounds, shorten
from harness.corpus import Corpus, check_fits, load_corpus, retokenise, take, with_requests
from harness.engine import Adapter, Scalar
from harness.errors import EngineError
from harness.execute import Executor
from harness.expected import expected_of, missing_from
from harness.limits import stated_limits
from harness.matrix import Matrix
from harness.plan import Plan
from harness.progress import Progress
from harness.settings import Settings, resolve
from harness.stages import order_stages
from harness.traces import Traces


@dataclass(frozen=True, slots=True, kw_only=True)
class CensusRequest:
    """Whom to ask what. `prompts` is how many of the corpus's first requests are asked; None: all of them."""

    adapter: Adapter
    model: str
    overrides: Mapping[str, Scalar]
    corpus: str
    prompts: int | None
    companions: tuple[str, int]  # corpus and how many of its requests
    design: Design
    folder: Path
    deadline_s: float


def run_census(request: CensusRequest, progress: Progress) -> dict[str, object]:
    """Asks and counts; returns the record. Raises EngineError, UsageError."""
    adapter, model = request.adapter, request.model
    settings = resolve(adapter, [("--set", request.overrides)])
    corpus = _load(request, request.corpus, request.design.max_tokens)
    asked = take(corpus, min(request.prompts or len(corpus.requests), len(corpus.requests)))
    name, count = request.companions
    beside = take(_load(request, name), count).requests if count else ()
    rounds = build_rounds(asked.requests, beside, request.design)
    plan = _plan(adapter.name, model, settings, asked, rounds)
    captures, caps = _capture(plan, request, rounds, progress)
    census = count_census(request.design, rounds, captures, caps)
    subject = {
        "engine": adapter.name, "model": model, "settings": dict(settings), "corpus": request.corpus,
        "corpus_digest": asked.digest, "companions": f"{name}:{count}",
    }  # fmt: skip
    return census_record(census, subject, adapter.tokenizer(model).decode)


def _load(request: CensusRequest, name: str, max_tokens: int | None = None) -> Corpus:
    facts = request.adapter.model_facts(request.model)
    corpus = retokenise(load_corpus(name), request.adapter.tokenizer(request.model))
    corpus = with_requests(corpus, [shorten(one, max_tokens) for one in corpus.requests])
    check_fits(corpus, facts.vocab_size, facts.max_position_embeddings)
    return corpus


def _plan(engine: str, model: str, settings: Settings, corpus: Corpus, rounds: Sequence[Round]) -> Plan:
    lifetime = Lifetime(engine=engine, model=model, settings=settings, ordinal=0)
    cases: dict[str, Case] = {}
    corpora: dict[tuple[str, str], Corpus] = {}
    for number, one in enumerate(rounds):
        name = f"census round {number}"
        corpora[model, name] = with_requests(corpus, one.requests, name=name)
        case = Case(
            lifetime=lifetime, corpus=name, corpus_digest=corpora[model, name].digest,
            requests=tuple(request.id for request in one.requests), companions=None, schedule=one.schedule,
            prelude=None, replay="natural", golden=None, repetition=0, seed_offset=0, logits_digests=False,
        )  # fmt: skip
        cases[case.id] = case
    matrix = Matrix(name="census", path=Path("census"), cells=(), allow_unsupported=(), digest="")
    return Plan(
        matrix=matrix, engine=engine, model=model, settings=settings, pairs=(), cases=cases,
        stages=order_stages(cases), corpora=corpora,
    )  # fmt: skip


def _capture(
    plan: Plan, request: CensusRequest, rounds: Sequence[Round], progress: Progress
) -> tuple[list[Traces], tuple[str, ...]]:
    """The captures in the order of the rounds, and what the engine says may be claimed of them."""
    executor = Executor(plan, request.adapter, request.folder, secrets.token_hex(8), progress, request.deadline_s)
    execution = executor.run()
    for failure in execution.failures.values():
        raise EngineError("\n".join([failure.message, *failure.log_tail]))
    captures = [executor.store.read(case) for case in plan.cases]
    for number, (one, capture) in enumerate(zip(rounds, captures, strict=True)):
        judged = [copy.request.id for copy in one.copies]
        missing = missing_from(capture.traces, expected_of(one.requests, judged, one.schedule))
        if missing:
            raise EngineError(f"round {number}: {'; '.join(missing)}")
    return [capture.traces for capture in captures], stated_limits(captures, company=True)
