"""What adapters of engines that run in a process of ours answer alike, and a loop for engines that go step by step.

An adapter may stand on `OfflineAdapter` and say the rest in class attributes; an engine that can give the logprobs of
the next token for a batch of texts may stand on `SteppedEngine`. Neither is needed: both only spell out protocols of
`harness.engine`. It knows no engine and imports nothing heavy. Rules: an axis of a setting's name owns that setting; a
setting that is none is refused; every request is answered or the work is an error.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

from engines import hf_folders
from engines.arrivals import Arrivals
from engines.offline_checks import complete, golden_paths, own_fields, refuse_features
from harness.engine import (
    AxisSupport,
    Engine,
    Field,
    ModelFacts,
    ModelInfo,
    Progress,
    Rule,
    Scalar,
    Setting,
    Tokenizer,
    Work,
)
from harness.errors import Unsupported

if TYPE_CHECKING:  # numpy stays out of the command line's import
    from engines.offline_traces import Answer, Ran
    from harness.traces import Float32, Traces

QUIET = {"HF_HUB_OFFLINE": "1", "PYTHONHASHSEED": "0", "TOKENIZERS_PARALLELISM": "false"}


def offer_axes(
    offered: Mapping[str, Iterable[str]], refused: Mapping[str, str], settings: Iterable[Setting] = (),
    also: Iterable[str] = (), resets: Iterable[str] = (),
) -> dict[str, AxisSupport]:  # fmt: skip
    """Axis name to its support. `offered` gives the fields that move with an axis, beside its own setting's and `also`.

    `refused` gives reasons, `resets` the axes whose arms share a process (`AxisSupport.resets`).
    """
    known, common, sharing = tuple(settings), tuple(also), frozenset(resets)
    support = {
        name: AxisSupport(fields=(*own_fields(name, known), *fields, *common), resets=name in sharing)
        for name, fields in offered.items()
    }
    return support | {name: AxisSupport(unsupported=reason) for name, reason in refused.items()}


class OfflineAdapter:
    """An adapter in class attributes; models are Hugging Face folders unless a subclass says otherwise."""

    name: ClassVar[str]
    options: ClassVar[tuple[Setting, ...]] = ()
    presets: ClassVar[Mapping[str, Mapping[str, Scalar]]] = {}  # the modes
    offered: ClassVar[Mapping[str, tuple[str, ...]]] = {}  # axis to the fields that move with it, beside its setting's
    moved: ClassVar[tuple[str, ...]] = ()  # fields that move with every axis
    refused: ClassVar[Mapping[str, str]] = {}  # axis to the reason
    resets: ClassVar[frozenset[str]] = frozenset()
    rule: ClassVar[Rule] = "topk"

    def settings(self) -> tuple[Setting, ...]:
        """Every option `--set` accepts."""
        return self.options

    def modes(self) -> Mapping[str, Mapping[str, Scalar]]:
        """Mode to settings."""
        return self.presets

    def axes(self) -> Mapping[str, AxisSupport]:
        """Every axis this engine can vary, and those it refuses."""
        return offer_axes(self.offered, self.refused, self.options, self.moved, self.resets)

    def strongest_rule(self) -> Rule:
        """What the evidence allows."""
        return self.rule

    def models(self) -> tuple[ModelInfo, ...]:
        """The named models and the kind of path."""
        return hf_folders.list_models()

    def model_facts(self, model: str) -> ModelFacts:
        """Vocabulary and context. Raises ModelError."""
        return hf_folders.model_facts(model)

    def tokenizer(self, model: str) -> Tokenizer:
        """The model's tokenizer. Raises ModelError."""
        return hf_folders.open_tokenizer(model)

    def complete(self, configuration: Mapping[str, Scalar]) -> dict[str, Scalar]:
        """Every setting with its value. Raises EngineError for a name that is none."""
        return complete(self.name, self.options, configuration)

    def environment(self, configuration: Mapping[str, Scalar]) -> Mapping[str, str]:
        """No network, and the engine's own variables."""
        return {**QUIET, **self.variables(self.complete(configuration))}

    def variables(self, settings: Mapping[str, Scalar]) -> Mapping[str, str]:  # noqa: ARG002 - for subclasses
        """What else the child process must carry before anything is imported; `settings` holds every setting."""
        return {}

    def start(self, model: str, configuration: Mapping[str, Scalar]) -> Engine:
        """Starts the engine; called in the child process only. Raises EngineError, ModelError, Unsupported."""
        return self.open(model, self.complete(configuration))

    def open(self, model: str, settings: Mapping[str, Scalar]) -> Engine:
        """Starts the engine with every setting. Raises EngineError, ModelError, Unsupported."""
        raise NotImplementedError


class SteppedEngine:
    """An engine of which a subclass gives `forward`: all that run are computed in every step, prompts whole.

    Requests are greedy unless a subclass gives `take` and names the features that it then offers
    (`engines.offline_checks.refuse_features`).
    """

    features: ClassVar[frozenset[str]] = frozenset()

    def __init__(self, settings: Mapping[str, Scalar]) -> None:
        """`settings` holds every setting."""
        self.settings = settings

    def forward(self, texts: Sequence[Sequence[int]]) -> Sequence[Float32]:
        """(V,) float32 logprobs of the next token after each text, of raw logits; one step computes all of them."""
        raise NotImplementedError

    def take(self, answer: Answer, logprobs: Float32) -> int:  # noqa: ARG002 - for subclasses
        """The token that the sampler takes for the next position."""
        return int(logprobs.argmax())

    def resolved(self) -> Mapping[str, Scalar]:
        """The settings, which are what was settled on."""
        return self.settings

    def observed(self) -> Mapping[str, Scalar]:
        """Nothing, unless a subclass reads it from inside."""
        return {}

    def fingerprint(self) -> tuple[Field, ...]:
        """Nothing that only the engine can know, unless a subclass says so."""
        return ()

    def stop(self) -> None:
        """Nothing outlives the process."""

    def generate(self, work: Work, progress: Progress) -> Traces:
        """Runs one work. Raises EngineError, Unsupported."""
        from engines.offline_traces import Answer, Ran, write_traces

        if work.logits_digests:
            raise Unsupported("rule `tensors`: this engine reports no logits")
        for request in work.requests:
            refuse_features(request, type(self).__name__, offered=self.features)
        requests, golden = {one.id: one for one in work.requests}, golden_paths(work)
        arrivals, answers, ran, step = Arrivals(work.schedule, requests), dict[str, Answer](), list[Ran](), 0
        while arrivals.pending or any(not one.finish_reason for one in answers.values()):
            for due in arrivals.take_due(step, {name: one.standing for name, one in answers.items()}):
                answers[due.request] = Answer(request=requests[due.request], arrival=due, arrival_s=0.0)
            running = [one for one in answers.values() if not one.finish_reason]
            rows = self.forward([(*one.request.prompt_token_ids, *one.tokens) for one in running])
            for one, row in zip(running, rows, strict=True):
                ran.append(_ran(step, one))
                self._advance(one, row, golden.get(one.request.id))
            progress(len(answers) - len(running), sum(len(one.positions) for one in answers.values()))
            step += 1
        return write_traces([answers[due.request] for due in work.schedule.arrivals], ran)

    def _advance(self, answer: Answer, logprobs: Float32, golden: tuple[int, ...] | None) -> None:
        """Takes the next position, and ends the answer where it is due."""
        from engines.offline_traces import Position, rank

        made, sampling = len(answer.positions), answer.request.sampling
        pick = self.take(answer, logprobs)
        token = pick if golden is None else golden[made]
        ids, values = rank(logprobs, sampling.logprobs)
        answer.append(Position(token, pick, logprobs[token], ids.tolist(), values), 0.0)
        leaving = answer.arrival.cancel_after_tokens
        if made + 1 == (sampling.max_tokens if golden is None else len(golden)):
            answer.end("length", 0.0)
        elif leaving is not None and made + 1 >= leaving:
            answer.end("abort", 0.0)


def _ran(step: int, answer: Answer) -> Ran:
    """The prompt in an answer's first step, its newest token in every other."""
    from engines.offline_traces import Ran

    prompt, made = len(answer.request.prompt_token_ids), len(answer.positions)
    return Ran(step, answer.request.id, 0, prompt) if not made else Ran(step, answer.request.id, prompt + made - 1, 1)
