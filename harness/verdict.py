"""Verdicts and everything they rest on, as values. It does not know how they are reached or shown."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Literal

from harness.lifetime import Failure

if TYPE_CHECKING:  # numpy stays out of the command line's import
    from harness.agreement import AgreementResult

MOST_WHERE = 2000  # positions listed of one request


class VerdictName(StrEnum):
    """What a pair came to; DESIGN's words."""

    PASS = "PASS"  # noqa: S105 - a verdict, not a password
    FAIL = "FAIL"
    APPROVED = "APPROVED"
    INSUFFICIENT = "INSUFFICIENT"
    UNSUPPORTED = "UNSUPPORTED"
    ERROR = "ERROR"


@dataclass(frozen=True, slots=True, kw_only=True)
class FloorResult:
    """The reference captured twice."""

    verdict: Literal["same", "different", "error"]
    positions: int
    sentence: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlResult:
    """The run that must differ. `fired` is False when it was silent, could not run, or was only noise."""

    kind: Literal["mode", "variant", "fault", "planted", "none"]
    value: str
    fired: bool
    sentence: str
    positions: int
    differing_positions: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparisonResult:
    """Counts of the comparison between reference and variant."""

    requests: int
    positions: int
    elements: int
    witnessed: int
    differing_positions: int
    differing_requests: int
    fields: Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstDivergence:
    """Where two captures first differ. `ulp`, `delta_logprob` and `gap` are None when the field is no float."""

    request: str
    sample: int
    position: int
    field: str
    reference: str
    variant: str
    ulp: int | None
    delta_logprob: float | None
    tie: str
    gap: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestDivergence:
    """One request's share of a difference; `first` is None when it does not differ.

    `where` lists the differing positions, the first MOST_WHERE of them.
    """

    request: str
    positions: int
    differing: int
    first: int | None
    where: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DiagnosisResult:
    """Which layer differs, and how much."""

    layer: str
    reason: str
    text: str
    first: FirstDivergence | None
    max_abs_delta_logprob: float | None
    max_ulp: int | None
    kl_k1: float | None
    kl_k3: float | None
    per_request: tuple[RequestDivergence, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """One pair, judged. `expected` is the verdict the cell declares to be its point."""

    cell: str
    label: str
    verdict: VerdictName
    reason: str
    expected: VerdictName | None = None
    foreseen: bool = False
    claims: tuple[str, ...] = ()
    caps: tuple[str, ...] = ()
    floor: FloorResult | None = None
    comparison: ComparisonResult | None = None
    control: ControlResult | None = None
    diagnosis: DiagnosisResult | None = None
    undeclared: tuple[str, ...] = ()
    agreement: AgreementResult | None = None  # on axes that compute the same logprobs in two ways
    failure: Failure | None = None
    digests: Mapping[str, str] | None = None
