"""Measures the negative log-likelihood of texts: an engine is forced along each and says what it would have given.

It does not compare. Rules: a text is a request's prompt, its first token given and all others forced; one engine
process measures all of them, at once; an answer that left the text is an error.
"""

from __future__ import annotations

import dataclasses
import hashlib
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from harness import registry
from harness.baseline.accept import stored_fingerprint
from harness.baseline.perplexity import Measurement, Sample, sample_nll
from harness.capture import Capture
from harness.corpus import load_corpus
from harness.corpus.json_lines import request_json
from harness.corpus.retokenise import check_fits, retokenise
from harness.engine import Scalar
from harness.errors import EngineError, Unsupported, UsageError
from harness.fingerprint import Fingerprint
from harness.finished import model_key
from harness.lifetime import LifetimeError, LifetimeProcess
from harness.plan import Subject
from harness.request import Request, Sampling
from harness.schedules import build_schedule
from harness.settings import resolve
from harness.store import Store

CASE = "0" * 16


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Every `of`-th sample, beginning with the `number`-th (counted from 1)."""

    number: int = 1
    of: int = 1


def measure(subject: Subject, corpus_name: str, part: Part, deadline_s: float) -> Measurement:
    """Runs the engine over a corpus, or a part. Raises UsageError, EngineError, Unsupported."""
    adapter = subject.adapter
    facts = adapter.model_facts(subject.model)
    corpus = retokenise(load_corpus(corpus_name), adapter.tokenizer(subject.model))
    texts = {request.id: request.prompt_token_ids for request in corpus.requests}
    short = sorted(name for name, tokens in texts.items() if len(tokens) < 2)
    if short:
        raise UsageError(f"corpus {corpus_name!r}: a text needs at least 2 tokens; too short: {', '.join(short[:5])}")
    chosen = sorted(texts)[part.number - 1 :: part.of]
    if not chosen:
        raise UsageError(f"--part {part.number}/{part.of}: the corpus has {len(texts)} samples, so this part is empty")
    requests = tuple(_request(name, texts[name]) for name in chosen)
    check_fits(dataclasses.replace(corpus, requests=requests), facts.vocab_size, facts.max_position_embeddings)
    settings = dict(resolve(adapter, [("--set", subject.overrides)]))
    capture = _capture(subject, settings, requests, {name: texts[name][1:] for name in chosen}, deadline_s)
    host = next((str(field.value) for field in capture.subject if field.name == "host.name"), "unknown")
    return Measurement(
        corpus=corpus_name, corpus_digest=corpus.digest, whole=len(texts), engine=adapter.name,
        model=model_key(subject.model), host=hashlib.sha256(host.encode()).hexdigest(),
        fingerprint=_without_work(capture), samples=_samples(capture, texts, chosen),
    )  # fmt: skip


def _request(name: str, tokens: Sequence[int]) -> Request:
    sampling = Sampling(
        temperature=0.0, top_p=1.0, top_k=0, min_p=0.0, repetition_penalty=1.0, frequency_penalty=0.0,
        presence_penalty=0.0, seed=None, max_tokens=len(tokens) - 1, min_tokens=0, ignore_eos=True, stop=(),
        stop_token_ids=(), logit_bias=(), logprobs=1, n=1,
    )  # fmt: skip
    return Request(id=name, prompt_token_ids=tuple(tokens[:1]), text=None, messages=None, sampling=sampling,
                   grammar=None, images=())  # fmt: skip


def _capture(
    subject: Subject, settings: dict[str, Scalar], requests: Sequence[Request], golden: dict[str, tuple[int, ...]],
    deadline_s: float,
) -> Capture:  # fmt: skip
    schedule = build_schedule("together", [request.id for request in requests])
    with tempfile.TemporaryDirectory(prefix="samebits-") as folder:
        try:
            with LifetimeProcess(subject.adapter.environment(settings), Path(folder) / "engine.log") as process:
                process.ask(
                    {
                        "do": "start",
                        "engine": subject.adapter.name,
                        "model": subject.model,
                        "settings": settings,
                        "store": folder,
                        "session": "perplexity",
                    },
                    deadline_s,
                )
                process.ask(
                    {
                        "do": "capture",
                        "case": CASE,
                        "requests": [request_json(item) for item in requests],
                        "schedule": dataclasses.asdict(schedule),
                        "replay": "golden",
                        "cache": None,
                        "reset": False,
                        "logits_digests": False,
                        "golden": {name: list(tokens) for name, tokens in golden.items()},
                        "prelude": [],
                        "work": {},
                    },
                    deadline_s,
                )
        except LifetimeError as error:
            kind = Unsupported if error.failure.kind == "unsupported" else EngineError
            raise kind("\n".join([error.failure.message, *error.failure.log_tail])) from error
        return Store(Path(folder)).read(CASE)


def _samples(capture: Capture, texts: dict[str, tuple[int, ...]], chosen: Sequence[str]) -> tuple[Sample, ...]:
    """Raises EngineError where an answer is missing, left the text, or has no number."""
    requests, positions = capture.traces.requests, capture.traces.positions
    if positions.logprob is None:
        raise EngineError("the engine reports no logprobs, so it has no perplexity")
    ends = np.cumsum(requests.length)
    found: list[Sample] = []
    for row, name in enumerate(requests.id):
        part = slice(int(ends[row] - requests.length[row]), int(ends[row]))
        if tuple(positions.token[part].tolist()) != tuple(texts[name][1:]):
            raise EngineError(f"sample {name!r}: the engine left the text it was forced along")
        logprobs = positions.logprob[part].astype(np.float64).tolist()
        if not np.isfinite(logprobs).all():
            raise EngineError(f"sample {name!r}: a logprob is no finite number")
        found.append(Sample(id=name, tokens=len(logprobs), nll=sample_nll(logprobs)))
    if sorted(sample.id for sample in found) != list(chosen):
        raise EngineError(f"the engine answered {len(found)} of {len(chosen)} samples")
    return tuple(sorted(found))


def _without_work(capture: Capture) -> Fingerprint:
    """The fingerprint of engine and host: what a part of a corpus shares with the others."""
    whole = stored_fingerprint(capture)
    return Fingerprint(fields=tuple(field for field in whole.fields if field.field_class == "identity"))


def parse_part(text: str) -> Part:
    """`2/4` as a part. Raises UsageError."""
    number, slash, of = text.partition("/")
    if not slash or not number.isdecimal() or not of.isdecimal() or not 1 <= int(number) <= int(of):
        raise UsageError(f"--part {text!r}: expected NUMBER/PARTS such as 1/2")
    return Part(number=int(number), of=int(of))


def choose_subject(engine: str, model: str | None, overrides: dict[str, Scalar]) -> Subject:
    """The engine, model and settings to measure with. Raises UsageError."""
    from harness.choose import default_model

    chosen = model if model is not None else default_model(engine)
    return Subject(adapter=registry.adapter(engine), model=chosen, overrides=overrides)
