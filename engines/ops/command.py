"""`samebits ops`: surveys the operators of a model's shape and prints what varies. Exit code 1 if something does."""

from __future__ import annotations

import json
import platform
from dataclasses import asdict, dataclass

import click

from engines.ops.survey import Finding, Subject, Survey, survey
from harness.errors import ModelError, UsageError

SCHEMA = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class OpsOptions:
    """The command's options."""

    impl: str
    model: str
    arithmetic: str
    dtypes: tuple[str, ...]  # empty: those of the implementation that are surveyed by default
    threads: tuple[int, ...]
    rows: int
    repeat: int
    as_json: bool


def ops(**options: object) -> int:
    """Prints the survey; 0: nothing varies, 1: something does. Raises UsageError, ModelError."""
    return run_ops(OpsOptions(**options))  # type: ignore[arg-type]


def run_ops(options: OpsOptions) -> int:
    """See `ops`."""
    subject = _subject(options)
    result = survey(subject)
    click.echo(as_json(subject, result) if options.as_json else as_text(subject, result))
    return int(any(finding.variation.varies_from is not None for finding in result.findings))


def _subject(options: OpsOptions) -> Subject:
    from engines.bundled.errors import ModelError as BundledModelError
    from engines.bundled.models.catalogue import open_source
    from engines.ops import bundled_operators, torch_operators

    operators = {"bundled": bundled_operators, "torch": torch_operators}[options.impl]
    known = operators.DTYPES
    unknown = [dtype for dtype in options.dtypes if dtype not in known]
    if unknown:
        raise UsageError(f"--dtype {unknown[0]}: {options.impl} computes in {', '.join(known)}")
    if options.impl == "torch" and options.arithmetic != "portable":
        raise UsageError(f"--arithmetic {options.arithmetic}: torch has none to choose; drop it, or use --impl bundled")
    try:
        config = open_source(options.model).config()
    except BundledModelError as error:
        raise ModelError(str(error)) from error
    return Subject(
        impl=options.impl,
        arithmetic=options.arithmetic,
        config=config,
        dtypes=options.dtypes or operators.SURVEYED,
        threads=tuple(sorted(set(options.threads))),
        rows=options.rows,
        repeat=options.repeat,
    )


def as_text(subject: Subject, result: Survey) -> str:
    """One line per finding, and what varies at the end."""
    lines = [f"{'operator':<21} {'shape':<28} {'dtype':<9} {'threads':<8} {'condition':<9} {'cost/torch':<13} result"]
    lines += [_line(finding) for finding in result.findings]
    lines += [f"{name:<21} not surveyed: {reason}" for name, reason in sorted(result.absent.items())]
    varying = sorted({f"{f.operator} ({f.variation.condition})" for f in result.findings if f.variation.varies_from})
    total = len(result.findings)
    name = subject.impl if subject.impl == "torch" else f"{subject.impl} {subject.arithmetic}"
    words = f"{len(varying)} vary: {', '.join(varying)}" if varying else "nothing varies"
    return "\n".join([*lines, f"{name}: {total} findings, {words}"])


def _line(finding: Finding) -> str:
    variation = finding.variation
    counts = [count for group in variation.classes for count in group]
    if variation.varies_from is None:
        words = f"invariant over {len(counts)} calls, {min(counts)} to {max(counts)}"
    else:
        groups = " ".join("{" + _ranges(group) + "}" for group in variation.classes)
        words = f"varies from {variation.varies_from}, by up to {variation.ulp} ulp: {groups}"
    cost = "" if finding.cost is None else f"{finding.cost[0]:.2f} {finding.cost[1]:.2f}"
    return (
        f"{finding.operator:<21} {finding.shape:<28} {finding.dtype:<9} {finding.threads:<8} "
        f"{variation.condition:<9} {cost:<13} {words}"
    )


def _ranges(group: tuple[int, ...]) -> str:
    return ", ".join(map(str, group)) if len(group) <= 4 else f"{group[0]}, {group[1]}, … {group[-1]}: {len(group)}"


def as_json(subject: Subject, result: Survey) -> str:
    """The same as JSON, schema 1."""
    findings = [
        {**asdict(finding), "variation": asdict(finding.variation) | {"varies_from": finding.variation.varies_from}}
        for finding in result.findings
    ]
    document = {
        "schema": SCHEMA,
        "impl": subject.impl,
        "arithmetic": subject.arithmetic if subject.impl == "bundled" else None,
        "machine": platform.machine(),
        "rows": subject.rows,
        "findings": findings,
        "absent": result.absent,
    }
    return json.dumps(document, indent=1)
