"""From a finished run's folder to its scores. It holds no judging.

Rules: a run is read, never changed; a corpus without a key, a forced arm, an item that only a model judges and a
missing capture are told as reasons; a run of which nothing can be scored is an error; rules and a model judge score
apart.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from harness import registry
from harness.corpus import Corpus, load_corpus, retokenise
from harness.errors import CorpusError, StoreError, UsageError
from harness.evaluation.judge_spec import JudgeSpec
from harness.evaluation.judges import Judgement, Output, judge
from harness.evaluation.key import ANSWERS, Item, read_key
from harness.evaluation.model_judge import Judged, Question, ask_judge, prompt_of
from harness.evaluation.score import SCHEMA, PairScore, ScoredArms, read_outputs, score_pair
from harness.evaluation.standing import Standing, identity, judge_standing
from harness.fingerprint import field_records
from harness.finished import FinishedRun, JudgedPair, read_finished
from harness.progress import Progress
from harness.request import Request
from harness.store import Store

ARMS = {"pair": ("reference", "variant"), "control": ("control_reference", "control_variant")}
JUDGE_FOLDER = "judge"  # of the scored run: what the model judge was asked and said


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeRequest:
    """A model judge, the folder of its own cells' run if there is one, and how long one capture of it may take."""

    spec: JudgeSpec
    run: Path | None
    deadline_s: float
    progress: Progress


def evaluate(folder: Path, answers: Path | None, asked: JudgeRequest | None = None) -> dict[str, object]:
    """The scores of every pair that can be scored; returns the record.

    Raises:
        StoreError, UsageError, CorpusError: nothing to score, or a key or run that cannot be used.
        EngineError: the model judge's engine failed.
    """
    run = read_finished(folder)
    scorer = _Scorer(run, folder, answers)
    arms, unscored = scorer.collect()
    scores = [score_pair(one, judge) for one in arms if any(item.by_rule for item in one.items)]
    record: dict[str, object] | None = None
    if asked is not None and arms:
        judged, standing = _ask(asked, arms, folder)
        scores += [_by_model(asked.spec, one, judged, standing) for one in arms]
        record = _judge_record(asked.spec, judged, standing)
    else:
        unscored += _left_to_models(arms)
    if not scores:
        raise UsageError(f"{folder}: nothing can be scored: {'; '.join(unscored)}")
    moved = {(one.label, item.request) for one in scores if one.arms == "pair" for item in one.moved}
    return {
        "schema": SCHEMA, "engine": run.engine, "model": run.model, "run": run.digest, "keys": scorer.digests,
        "exit_code": int(bool(moved)), "sentence": f"drift moved {len(moved)} answers outside controls",
        "judge": record, "scores": [one.to_json() for one in scores], "unscored": unscored,
    }  # fmt: skip


def _left_to_models(arms: Sequence[ScoredArms]) -> list[str]:
    """What only a model judge could score, when none was named."""
    counts = {one.label: sum(not item.by_rule for item in one.items) for one in arms if one.arms == "pair"}
    return [f"{label}: {count} items are for a model judge; name one with --judge"
            for label, count in counts.items() if count]  # fmt: skip


def _ask(asked: JudgeRequest, arms: Sequence[ScoredArms], folder: Path) -> tuple[Judged, Standing]:
    questions = [
        Question(item=item, question=one.questions[item.request], output=side[item.request].text)
        for one in arms
        for side in one.outputs
        for item in one.items
    ]
    judged = ask_judge(asked.spec, questions, folder / JUDGE_FOLDER, asked.progress, asked.deadline_s)
    command = asked.spec.command
    return judged, judge_standing(judged.fields, asked.spec.parse.rule, judged.differed, asked.run, command)


def _by_model(spec: JudgeSpec, arms: ScoredArms, judged: Judged, standing: Standing) -> PairScore:
    def judgement(item: Item, output: Output) -> Judgement:
        asked = Question(item=item, question=arms.questions[item.request], output=output.text)
        return judged.judgements[prompt_of(spec, asked)]

    return score_pair(arms, judgement, judged_by=spec.name, mark=standing.mark)


def _judge_record(spec: JudgeSpec, judged: Judged, standing: Standing) -> dict[str, object]:
    fingerprint = identity(judged.fields)
    return {
        "name": spec.name, "engine": spec.adapter.name, "model": spec.model, "settings": dict(spec.settings),
        "template": spec.template, "chat": spec.chat, "max_tokens": spec.max_tokens, "temperature": 0.0,
        "parse": {"choices": list(spec.parse.choices), "pattern": spec.parse.pattern,
                  "points": list(spec.parse.points), "rule": spec.parse.rule},
        "digest": spec.digest,
        "fingerprint": {"digest": fingerprint.digest, "fields": field_records(fingerprint.fields)},
        "questions": len(judged.judgements), "unread": judged.unread, "differed": judged.differed,
        "shown": not standing.reasons, "mark": standing.mark, "reasons": list(standing.reasons),
        "caps": list(standing.caps), "run": standing.run, "matrix": standing.matrix,
    }  # fmt: skip


class _Scorer:
    """Keeps keys, questions and the tokenizer."""

    def __init__(self, run: FinishedRun, folder: Path, answers: Path | None) -> None:
        self._run, self._store, self._answers = run, Store(folder / "captures"), answers
        self._model = str(run.raw["model"])
        self._tokenizer = registry.adapter(run.engine).tokenizer(self._model)
        self._keys: dict[str, tuple[tuple[Item, ...], Mapping[str, str]] | str] = {}
        self.digests: dict[str, str] = {}  # of the keys that were read, by corpus

    def collect(self) -> tuple[list[ScoredArms], list[str]]:
        """Arms that can be scored, and why each other pair cannot."""
        arms: list[ScoredArms] = []
        unscored: list[str] = []
        for pair in self._run.pairs:
            for name in ARMS:
                found = self._arms(pair, name)
                if isinstance(found, ScoredArms):
                    arms.append(found)
                elif name == "pair":
                    unscored.append(f"{pair.label}: {found}")
        return arms, unscored

    def _arms(self, pair: JudgedPair, name: str) -> ScoredArms | str:
        """Two arms' outputs, or why they cannot be scored."""
        cases = [pair.cases.get(role) for role in ARMS[name]]
        if pair.replay == "golden":
            return "its variant is forced along the reference's tokens, so there is no answer of its own"
        key = self._key(pair)
        if isinstance(key, str):
            return key
        if cases[0] is None or cases[1] is None:
            return f"the {name} was not captured"
        try:
            here, there = self._outputs(cases[0]), self._outputs(cases[1])
        except StoreError as error:
            return str(error)
        items, questions = key
        return ScoredArms(
            label=pair.label, arms=name, questions=questions, outputs=(here, there),
            verdict=str(pair.verdict) if name == "pair" else "a control: it is meant to differ",
            items=tuple(item for item in items if item.request in here and item.request in there),
        )  # fmt: skip

    def _outputs(self, case: str) -> Mapping[str, Output]:
        return read_outputs(self._store.read(case).traces, self._tokenizer.decode, self._tokenizer.encode)

    def _key(self, pair: JudgedPair) -> tuple[tuple[Item, ...], Mapping[str, str]] | str:
        if pair.corpus not in self._keys:
            self._keys[pair.corpus] = self._read_key(pair)
        return self._keys[pair.corpus]

    def _read_key(self, pair: JudgedPair) -> tuple[tuple[Item, ...], Mapping[str, str]] | str:
        try:
            corpus = load_corpus(pair.corpus)
        except CorpusError as error:
            return str(error)
        file = self._answers or corpus.path / ANSWERS
        if not file.is_file():
            return f"corpus {pair.corpus!r} has no answer key ({file.name})"
        if retokenise(corpus, self._tokenizer).digest != pair.corpus_digest:
            return f"corpus {pair.corpus!r} is not the one the run was made with"
        key = read_key(file, corpus.digest, [request.id for request in corpus.requests])
        self.digests[pair.corpus] = hashlib.sha256(file.read_bytes()).hexdigest()
        return key, self._questions(corpus)

    def _questions(self, corpus: Corpus) -> Mapping[str, str]:
        """What was asked, as text."""
        return {request.id: self._text(request) for request in corpus.requests}

    def _text(self, request: Request) -> str:
        if request.text is not None:
            return request.text
        if request.messages is not None:
            return "\n".join(f"{message.role}: {message.content}" for message in request.messages)
        return self._tokenizer.decode(request.prompt_token_ids)
