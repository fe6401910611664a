"""From a finished run's folder to its scores. It holds no judging.

Rules: a run is read, never changed; a corpus without a key, a forced arm and a missing capture are told as reasons, and
a run of which nothing can be scored is an error.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

from harness import registry
from harness.corpus import load_corpus, retokenise
from harness.errors import CorpusError, StoreError, UsageError
from harness.evaluation.judges import Output
from harness.evaluation.key import ANSWERS, Item, read_key
from harness.evaluation.score import SCHEMA, PairScore, read_outputs, score_pair
from harness.finished import FinishedRun, JudgedPair, read_finished
from harness.store import Store

ARMS = {"pair": ("reference", "variant"), "control": ("control_reference", "control_variant")}


def evaluate(folder: Path, answers: Path | None) -> dict[str, object]:
    """The scores of every pair that can be scored; returns the record. Raises StoreError, UsageError, CorpusError."""
    run = read_finished(folder)
    scorer = _Scorer(run, folder, answers)
    scores: list[PairScore] = []
    unscored: list[str] = []
    for pair in run.pairs:
        for arms in ARMS:
            found = scorer.score(pair, arms)
            if isinstance(found, PairScore):
                scores.append(found)
            elif arms == "pair":
                unscored.append(f"{pair.label}: {found}")
    if not scores:
        raise UsageError(f"{folder}: nothing can be scored: {'; '.join(unscored)}")
    moved = sum(len(one.moved) for one in scores if one.arms == "pair")
    return {
        "schema": SCHEMA, "engine": run.engine, "model": run.model, "run": run.digest, "keys": scorer.digests,
        "exit_code": int(moved > 0),
        "sentence": f"drift moved {moved} answers outside controls", "scores": [one.to_json() for one in scores],
        "unscored": unscored,
    }  # fmt: skip


class _Scorer:
    """Keeps keys and tokenizer."""

    def __init__(self, run: FinishedRun, folder: Path, answers: Path | None) -> None:
        self._store, self._answers = Store(folder / "captures"), answers
        self._model = str(run.raw["model"])
        self._tokenizer = registry.adapter(run.engine).tokenizer(self._model)
        self._keys: dict[str, tuple[Item, ...] | str] = {}
        self.digests: dict[str, str] = {}  # of the keys that were read, by corpus

    def score(self, pair: JudgedPair, arms: str) -> PairScore | str:
        """The score, or why there is none."""
        cases = [pair.cases.get(role) for role in ARMS[arms]]
        if pair.replay == "golden":
            return "its variant is forced along the reference's tokens, so there is no answer of its own"
        key = self._key(pair)
        if isinstance(key, str):
            return key
        if cases[0] is None or cases[1] is None:
            return f"the {arms} was not captured"
        try:
            outputs = (self._outputs(cases[0]), self._outputs(cases[1]))
        except StoreError as error:
            return str(error)
        verdict = str(pair.verdict) if arms == "pair" else "a control: it is meant to differ"
        return score_pair(pair.label, arms, verdict, key, outputs)

    def _outputs(self, case: str) -> Mapping[str, Output]:
        return read_outputs(self._store.read(case).traces, self._tokenizer.decode, self._tokenizer.encode)

    def _key(self, pair: JudgedPair) -> tuple[Item, ...] | str:
        if pair.corpus not in self._keys:
            self._keys[pair.corpus] = self._read_key(pair)
        return self._keys[pair.corpus]

    def _read_key(self, pair: JudgedPair) -> tuple[Item, ...] | str:
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
        return key
