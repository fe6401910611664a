"""The record of a run as frozen values, field for field as `run.json` has them.

It does not know files or how a report looks (`reports.reader` fills it in). Rules: a count or number that
the record does not have is None, never 0; text that it does not have is empty.
"""

from __future__ import annotations

from dataclasses import dataclass, field

SCHEMA = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """What was varied."""

    name: str
    reference: str
    variant: str
    home_layer: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Corpus:
    """What was asked; `weak` is the reason why a PASS over it says little, or empty."""

    name: str
    digest: str
    requests: int | None
    longest_prompt: int | None  # tokens
    weak: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Floor:
    """The reference captured twice: `same`, `different` or `error`."""

    verdict: str
    positions: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What was compared and what differed; `fields` counts differences by field."""

    requests: int | None
    positions: int | None
    elements: int | None
    witnessed: int | None
    differing_positions: int | None
    differing_requests: int | None
    fields: tuple[tuple[str, int], ...]

    @property
    def differing(self) -> tuple[tuple[str, int], ...]:
        """The fields that differ, most first."""
        found = ((name, count) for name, count in self.fields if count > 0)
        return tuple(sorted(found, key=lambda item: (-item[1], item[0])))


@dataclass(frozen=True, slots=True, kw_only=True)
class Control:
    """The run that must differ; `verdict` is its sentence. `fired` None: the record does not say."""

    kind: str
    value: str
    fired: bool | None
    verdict: str
    positions: int | None
    differing_positions: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class First:
    """The first differing position; `delta_logprob` and `gap` in nats."""

    request: str
    sample: int | None
    position: int | None
    field: str
    reference: str
    variant: str
    ulp: int | None
    delta_logprob: float | None
    tie: str
    gap: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRow:
    """How far one request agreed. `where` lists its differing positions when the record carries them."""

    request: str
    positions: int | None
    differing: int | None
    first: int | None
    where: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """Where a difference comes from and how large it is (ulp of float32, nats)."""

    layer: str
    reason: str
    first: First | None
    max_abs_delta_logprob: float | None
    max_ulp: int | None
    kl_k1: float | None
    kl_k3: float | None
    per_request: tuple[RequestRow, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AgreementRow:
    """All requests' n-th output token; absolute differences in nats."""

    position: int | None
    tokens: int | None
    mean: float | None
    most: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """How far the logprobs of the same tokens lie apart where they were computed in two ways (nats)."""

    tokens: int | None
    equal: int | None
    kl_k1: float | None
    kl_k3: float | None
    max_delta: float | None
    mean_delta: float | None
    perplexity_ratio: float | None
    pearson: float | None
    by_position: tuple[AgreementRow, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Error:
    """An engine's failure with the end of its log."""

    message: str
    log_tail: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """One cell and variant, judged."""

    cell: str
    variant: str
    invariant: str
    rule: str
    replay: str
    axis: Axis
    corpus: Corpus
    verdict: str
    expected: str
    foreseen: bool
    reason: str
    claims: tuple[str, ...]
    caps: tuple[str, ...]
    floor: Floor | None
    comparison: Comparison | None
    control: Control | None
    diagnosis: Diagnosis | None
    undeclared: tuple[str, ...]
    error: Error | None
    cases: tuple[tuple[str, str], ...]
    digests: tuple[tuple[str, str], ...]
    agreement: Agreement | None = None

    @property
    def label(self) -> str:
        """`cell[variant]`, as tests and the command line name it."""
        return f"{self.cell}[{self.variant}]" if self.variant else self.cell

    @property
    def is_expected(self) -> bool:
        """Whether showing this very verdict is the cell's point."""
        return self.expected != "" and self.expected == self.verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One unit that was run."""

    id: str
    schedule: str
    replay: str
    summary: str
    configuration: tuple[tuple[str, str], ...]
    lifetime: str
    requests: int | None
    positions: int | None
    seconds: float | None
    judged_digest: str
    process_nonce: str
    reused: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentField:
    """A fingerprint field; `value` None is unknown, and `source` says why."""

    name: str
    value: str | None
    field_class: str = field(metadata={"key": "class"})
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Fingerprint:
    """Our own process's fields, and those of the process that ran the engine."""

    observer: tuple[EnvironmentField, ...]
    subject: tuple[EnvironmentField, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Matrix:
    """The cells that were planned."""

    name: str
    path: str
    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Seconds:
    """Wall time: all of it, inside the engine's processes, and outside them."""

    total: float | None
    workers: float | None
    outside: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How much was planned, and how many pairs have a verdict."""

    cells: int | None
    pairs: int | None
    cases: int | None
    lifetimes: int | None
    judged: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Everything reports show of one run. Times are UTC; `cost` is what the mode cost, as label and value."""

    samebits: str
    matrix: Matrix
    engine: str
    model: str
    settings: tuple[tuple[str, str], ...]
    chosen: tuple[tuple[str, str], ...]  # those that a mode or the command line named
    started: str
    finished: str
    seconds: Seconds
    exit_code: int | None
    outcome: str
    plan: Plan
    verdicts: tuple[Verdict, ...]
    cases: tuple[Case, ...]
    fingerprint: Fingerprint
    cost: tuple[tuple[str, str], ...]
