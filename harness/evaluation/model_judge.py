"""Asks a model judge about outputs: prompts from its template, run through the engine seam, read by rule.

It does not know pairs or verdicts. Rules: temperature 0, each question alone; a question that is asked twice is asked
once; the whole is captured twice in one process, and readings that differ are counted; an output that cannot be read
earns nothing and says why, it is never left out.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.case import Case, Lifetime
from harness.corpus import Corpus, check_fits, with_requests
from harness.corpus.manifest import TokenizerName
from harness.engine import Field, Tokenizer
from harness.errors import EngineError
from harness.evaluation.judge_spec import JudgeSpec
from harness.evaluation.judges import Judgement, Output, likeliest, shown
from harness.evaluation.key import Item
from harness.evaluation.score import read_outputs
from harness.execute import Executor
from harness.expected import expected_of, missing_from
from harness.matrix import Matrix
from harness.plan import Plan
from harness.progress import Progress
from harness.request import MAX_TOP_LOGPROBS, Message, Request, Sampling
from harness.schedules import build_schedule
from harness.stages import order_stages

CORPUS = "judge"
UNREAD = "not read: "  # begins what was seen of an output that could not be read


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """One output to be judged."""

    item: Item
    question: str
    output: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """What a judge said. `differed` counts questions it read otherwise the second time; `fields` are its engine's."""

    judgements: Mapping[str, Judgement]  # by prompt
    differed: int
    fields: tuple[Field, ...]

    @property
    def unread(self) -> int:
        """Outputs that could not be read."""
        return sum(one.saw.startswith(UNREAD) for one in self.judgements.values())


def expected_text(item: Item) -> str:
    """What a template shows for `{expected}`."""
    if item.pattern:
        return f"text that matches {item.pattern}"
    if item.schema is not None:
        return f"JSON that satisfies {json.dumps(item.schema, sort_keys=True)}"
    return " or ".join(answer.strip() for answer in item.answers)


def prompt_of(spec: JudgeSpec, asked: Question) -> str:
    """The judge's prompt about one output."""
    return spec.prompt(asked.question, expected_text(asked.item), asked.output.strip())


def ask_judge(
    spec: JudgeSpec, questions: Sequence[Question], folder: Path, progress: Progress, deadline_s: float
) -> Judged:
    """Asks every question twice; captures and logs stay under `folder`. Raises EngineError, CorpusError, ModelError."""
    tokenizer = spec.adapter.tokenizer(spec.model)
    prompts = list(dict.fromkeys(prompt_of(spec, one) for one in questions))
    requests = tuple(_request(spec, tokenizer, f"question-{number:04d}", text) for number, text in enumerate(prompts))
    plan = _plan(spec, _corpus(spec, tokenizer, requests, folder))
    executor = Executor(plan, spec.adapter, folder, secrets.token_hex(8), progress, deadline_s)
    for failure in executor.run().failures.values():
        raise EngineError("\n".join([f"judge {spec.name!r}: {failure.message}", *failure.log_tail]))
    captures = [executor.store.read(case) for case in plan.cases]
    for case, capture in zip(plan.cases.values(), captures, strict=True):
        missing = missing_from(capture.traces, expected_of(requests, case.requests, case.schedule))
        if missing:
            raise EngineError(f"judge {spec.name!r}: {'; '.join(missing)}")
    readings = [
        {name: read_answer(spec, one) for name, one in outputs.items()}
        for outputs in (read_outputs(capture.traces, tokenizer.decode, tokenizer.encode) for capture in captures)
    ]
    first, again = ([one[request.id] for request in requests] for one in readings)
    return Judged(
        judgements=dict(zip(prompts, first, strict=True)), fields=captures[0].subject,
        differed=sum(here != there for here, there in zip(first, again, strict=True)),
    )  # fmt: skip


def read_answer(spec: JudgeSpec, output: Output) -> Judgement:
    """What a judge's own output says."""
    parse = spec.parse
    if parse.choices:
        choice, saw = likeliest(parse.choices, output)
    else:
        match = re.search(parse.pattern, output.text)
        choice = None if match is None else (match[1] if match.re.groups else match[0])
        saw = f"no match in {shown(output.text)}" if choice is None else shown(choice)
    if choice is None:
        return Judgement(points=0, saw=f"{UNREAD}{saw}")
    return Judgement(points=int(choice in parse.points), saw=saw)


def _request(spec: JudgeSpec, tokenizer: Tokenizer, name: str, text: str) -> Request:
    ids = tokenizer.encode_chat([("user", text)]) if spec.chat else tokenizer.encode(text)
    sampling = Sampling(
        temperature=0.0, top_p=1.0, top_k=0, min_p=0.0, repetition_penalty=1.0, frequency_penalty=0.0,
        presence_penalty=0.0, seed=None, max_tokens=spec.max_tokens, min_tokens=0, ignore_eos=False, stop=(),
        stop_token_ids=(), logit_bias=(), logprobs=MAX_TOP_LOGPROBS if spec.parse.choices else 0, n=1,
    )  # fmt: skip
    messages = (Message(role="user", content=text),) if spec.chat else None
    return Request(id=name, prompt_token_ids=ids, text=None if spec.chat else text, messages=messages,
                   sampling=sampling, grammar=None, images=())  # fmt: skip


def _corpus(spec: JudgeSpec, tokenizer: Tokenizer, requests: tuple[Request, ...], folder: Path) -> Corpus:
    name = TokenizerName(name=spec.model, digest=tokenizer.digest, vocab_size=tokenizer.vocab_size)
    empty = Corpus(name=CORPUS, description=f"questions to judge {spec.name}", digest="", tokenizer=name,
                   arbitrary_ids=(), requests=(), path=folder, origin="made by samebits eval")  # fmt: skip
    corpus = with_requests(empty, requests)
    facts = spec.adapter.model_facts(spec.model)
    check_fits(corpus, facts.vocab_size, facts.max_position_embeddings)
    return corpus


def _plan(spec: JudgeSpec, corpus: Corpus) -> Plan:
    """Two cases in one process: the questions, each alone, and the same again."""
    lifetime = Lifetime(engine=spec.adapter.name, model=spec.model, settings=spec.settings, ordinal=0)
    ids = tuple(request.id for request in corpus.requests)
    cases = [
        Case(
            lifetime=lifetime, corpus=CORPUS, corpus_digest=corpus.digest, requests=ids, companions=None,
            schedule=build_schedule("alone", ids), prelude=None, replay="natural", golden=None, repetition=repetition,
            seed_offset=0, logits_digests=False,
        )
        for repetition in range(2)
    ]  # fmt: skip
    by_id = {case.id: case for case in cases}
    matrix = Matrix(name=CORPUS, path=Path(CORPUS), cells=(), allow_unsupported=(), digest="")
    return Plan(
        matrix=matrix, engine=spec.adapter.name, model=spec.model, settings=spec.settings, pairs=(), cases=by_id,
        stages=order_stages(by_id), corpora={(spec.model, CORPUS): corpus},
    )  # fmt: skip
