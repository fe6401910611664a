"""Operators x shapes x dtypes x threads: what varies, from where on, by how much, and what it costs beside torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from engines.bundled.config import ModelConfig
from engines.ops.interface import Bits, Implementation, Piece
from engines.ops.measure import Variation, across_threads, seconds, vary_attention, vary_rows
from engines.ops.operators import (
    KEYS,
    AttentionOperator,
    RowOperator,
    absent_operators,
    attention_operator,
    normal,
    row_operators,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """What is surveyed."""

    impl: str  # "bundled" | "torch"
    arithmetic: str  # of bundled: "portable" | "free"
    config: ModelConfig
    dtypes: tuple[str, ...]
    threads: tuple[int, ...]
    rows: int  # most rows in a call
    repeat: int  # timed calls; 0: no timings


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One operator under one condition. `cost` is its time over torch's, with one row and with the most; None: it is
    torch's own, or nobody asked.
    """

    operator: str
    shape: str
    dtype: str
    threads: str
    variation: Variation
    cost: tuple[float, float] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """All findings, and what this model does not have."""

    findings: tuple[Finding, ...]
    absent: dict[str, str]


def survey(subject: Subject) -> Survey:
    """Runs everything."""
    findings: list[Finding] = []
    for dtype in subject.dtypes:
        for operator in row_operators(subject.config):
            findings += _survey_rows(subject, operator, dtype)
        findings += _survey_attention(subject, attention_operator(subject.config), dtype)
    return Survey(findings=tuple(findings), absent=absent_operators(subject.config))


def open_implementation(impl: str, config: ModelConfig, arithmetic: str, dtype: str, threads: int) -> Implementation:
    """The operators of a library."""
    if impl == "torch":
        from engines.ops.torch_operators import TorchOperators

        return TorchOperators(dtype, threads)
    from engines.ops.bundled_operators import BundledOperators

    return BundledOperators(config, arithmetic, threads)


def _open(subject: Subject, dtype: str, threads: int) -> Implementation:
    return open_implementation(subject.impl, subject.config, subject.arithmetic, dtype, threads)


def _torch(subject: Subject, dtype: str, threads: int) -> Implementation:
    return open_implementation("torch", subject.config, "", dtype, threads)


def _survey_rows(subject: Subject, operator: RowOperator, dtype: str) -> list[Finding]:
    x = normal(7, subject.rows, operator.columns) * operator.scale
    findings, results = [], []
    for threads in subject.threads:
        run = operator.build(_open(subject, dtype, threads))
        rows, place, bits = vary_rows(run, x, subject.rows)
        cost = None
        if subject.repeat and subject.impl != "torch":
            other = operator.build(_torch(subject, dtype, threads))
            ours, theirs = (
                [seconds(partial(f, x[:count]), subject.repeat) for count in (1, subject.rows)] for f in (run, other)
            )
            cost = (ours[0] / theirs[0], ours[1] / theirs[1])
        findings += [_finding(operator, dtype, str(threads), variation, cost) for variation in (rows, place)]
        results.append(bits)
    return findings + _compare_threads(subject, operator, dtype, results)


def _survey_attention(subject: Subject, operator: AttentionOperator, dtype: str) -> list[Finding]:
    most = min(subject.rows, 64)
    findings, results = [], []
    for threads in subject.threads:
        run = operator.build(_open(subject, dtype, threads), most)
        variations = vary_attention(run, KEYS, most)
        cost = None
        if subject.repeat and subject.impl != "torch":
            other = operator.build(_torch(subject, dtype, threads), most)
            calls = ([Piece(1, KEYS)], [Piece(1, KEYS)] * most)
            ours, theirs = ([seconds(partial(f, call), subject.repeat) for call in calls] for f in (run, other))
            cost = (ours[0] / theirs[0], ours[1] / theirs[1])
        findings += [_finding(operator, dtype, str(threads), variation, cost) for variation in variations]
        results.append({1: run([Piece(1, KEYS)]), KEYS: run([Piece(KEYS, KEYS)])})
    return findings + _compare_threads(subject, operator, dtype, results)


def _compare_threads(
    subject: Subject, operator: RowOperator | AttentionOperator, dtype: str, results: Sequence[dict[int, Bits]]
) -> list[Finding]:
    if len(subject.threads) < 2:
        return []
    names = ",".join(map(str, subject.threads))
    return [_finding(operator, dtype, names, across_threads(results, subject.threads), None)]


def _finding(
    operator: RowOperator | AttentionOperator, dtype: str, threads: str, variation: Variation,
    cost: tuple[float, float] | None,
) -> Finding:  # fmt: skip
    return Finding(
        operator=operator.name, shape=operator.shape, dtype=dtype, threads=threads, variation=variation, cost=cost
    )
