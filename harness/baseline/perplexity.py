"""A perplexity baseline: the negative log-likelihood of every sample of a frozen text corpus, compared exactly.

It does not run engines. Rules: a sample's number is the exactly rounded float64 sum of its float32 logprobs, compared
by its bits, sample by sample; an average is shown and never compared; a digest protects the file, so it is refreshed by
the command and by nothing else; a partial measurement, or one of several hosts or environments, is no baseline.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, cast

from harness.baseline.drift import NO_SUSPECT, suspected
from harness.canonical import digest
from harness.errors import StoreError, UsageError
from harness.fingerprint import Fingerprint
from harness.matrix import schema_mistake

SCHEMA = 1


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Sample:
    """One text. `nll` is in nats over `tokens` predicted tokens, as float.hex writes it: every bit is in it."""

    id: str
    tokens: int
    nll: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """What one engine made of a corpus, or of a part of it. `host` is a digest that tells hosts apart."""

    corpus: str
    corpus_digest: str
    whole: int  # samples in the whole corpus
    engine: str
    model: str
    host: str
    fingerprint: Fingerprint
    samples: tuple[Sample, ...]

    @property
    def perplexity(self) -> float:
        """exp of the mean over tokens; shown, never compared."""
        tokens = sum(sample.tokens for sample in self.samples)
        return math.exp(math.fsum(float.fromhex(sample.nll) for sample in self.samples) / tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class PerplexityBaseline:
    """A whole measurement that somebody accepted."""

    measurement: Measurement
    author: str
    reason: str
    accepted: str  # UTC


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One sample whose number is another; None: it is missing on that side."""

    id: str
    before: str | None
    now: str | None


def sample_nll(logprobs: Sequence[float]) -> str:
    """The negative exactly rounded sum of logprobs (nats), as float.hex writes it."""
    return (-math.fsum(logprobs)).hex()


def join(parts: Sequence[Measurement]) -> Measurement:
    """One measurement out of its parts. Raises UsageError for parts that do not belong together or overlap."""
    first = parts[0]
    for part in parts[1:]:
        for name in ("corpus_digest", "engine", "model", "whole"):
            if getattr(part, name) != getattr(first, name):
                raise UsageError(f"the parts differ in {name}: {getattr(first, name)} and {getattr(part, name)}; "
                                 "measure one corpus with one engine and model")  # fmt: skip
    samples = sorted(sample for part in parts for sample in part.samples)
    ids = [sample.id for sample in samples]
    twice = sorted({name for name in ids if ids.count(name) > 1})
    if twice:
        raise UsageError(f"measured twice: {', '.join(twice[:5])}; give each part once")
    return dataclasses.replace(first, samples=tuple(samples))


def accept_perplexity(parts: Sequence[Measurement], author: str, reason: str, now: datetime) -> PerplexityBaseline:
    """The baseline of a whole measurement. Raises UsageError for a partial one, or one of several hosts."""
    joined = join(parts)
    if not reason.strip():
        raise UsageError("--reason: expected why these numbers are accepted, got nothing")
    if len({part.host for part in parts}) > 1:
        raise UsageError("the parts were measured on several hosts: their numbers are not of one environment; measure "
                         "the whole corpus on one host")  # fmt: skip
    if len({part.fingerprint.digest for part in parts}) > 1:
        raise UsageError("the parts were measured in several environments (their identity fields differ); measure the "
                         "whole corpus in one")  # fmt: skip
    if len(joined.samples) != joined.whole:
        raise UsageError(f"partial: {len(joined.samples)} of {joined.whole} samples were measured; measure the whole "
                         "corpus before it becomes a baseline")  # fmt: skip
    return PerplexityBaseline(measurement=joined, author=author, reason=reason, accepted=f"{now:%Y-%m-%dT%H:%M:%SZ}")


def compare_perplexity(baseline: PerplexityBaseline, now: Measurement) -> tuple[Change, ...]:
    """Every sample whose number is another, to the bit. Raises UsageError for another corpus, engine or model."""
    before = baseline.measurement
    for name in ("corpus_digest", "engine", "model"):
        if getattr(before, name) != getattr(now, name):
            raise UsageError(f"the baseline is of another {name} ({getattr(before, name)}, now {getattr(now, name)}); "
                             "accept one for it")  # fmt: skip
    old = {sample.id: sample.nll for sample in before.samples}
    new = {sample.id: sample.nll for sample in now.samples}
    return tuple(Change(id=name, before=old.get(name), now=new.get(name))
                 for name in sorted(old | new) if old.get(name) != new.get(name))  # fmt: skip


def describe_changes(baseline: PerplexityBaseline, now: Measurement, changes: Sequence[Change]) -> str:
    """What changed, how much, and what is suspected, in words."""
    if not changes:
        return (
            f"{len(now.samples)} samples, every bit as accepted on {baseline.accepted}; perplexity {now.perplexity:.6g}"
        )
    suspects, _ = suspected(baseline.measurement.fingerprint, now.fingerprint)
    lines = [
        f"{len(changes)} of {len(baseline.measurement.samples)} samples differ from the baseline of {baseline.accepted}"
    ]
    lines += [f"  {change.id}: {_shown(change.before)} -> {_shown(change.now)}" for change in changes[:10]]
    lines += [f"  …and {len(changes) - 10} more"] if len(changes) > 10 else []
    lines.append(f"changed: {'; '.join(suspects)}" if suspects else NO_SUSPECT)
    return "\n".join(lines)


def _shown(nll: str | None) -> str:
    return "missing" if nll is None else f"{float.fromhex(nll):.9g} nats ({nll})"


def measurement_json(measurement: Measurement) -> dict[str, object]:
    """A measurement for `json.dump`."""
    value = {field.name: getattr(measurement, field.name) for field in dataclasses.fields(measurement)}
    return {"schema": SCHEMA, **value, "fingerprint": measurement.fingerprint.to_json(),
            "samples": [asdict(sample) for sample in measurement.samples]}  # fmt: skip


def baseline_json(baseline: PerplexityBaseline) -> dict[str, object]:
    """A baseline for `json.dump`, with the digest that protects it."""
    content = {"measurement": measurement_json(baseline.measurement), "author": baseline.author,
               "reason": baseline.reason, "accepted": baseline.accepted}  # fmt: skip
    return {"schema": SCHEMA, "digest": digest(content), **content}


def read_measurement(file: Path) -> Measurement:
    """A file that `measure` wrote. Raises StoreError."""
    return _measurement(_load(file), file)


def read_perplexity(file: Path) -> PerplexityBaseline:
    """A baseline's file. Raises StoreError for one that was edited."""
    value = _load(file)
    content = {name: value.get(name) for name in ("measurement", "author", "reason", "accepted")}
    found = digest(content)
    if value.get("digest") != found:
        raise StoreError(
            f"{file}: expected digest {found} for this content, found {value.get('digest')}: it was edited; "
            "restore it, or refresh it with `samebits perplexity accept`"
        )
    measurement = _measurement(cast("dict[str, Any]", content["measurement"]), file)
    return PerplexityBaseline(measurement=measurement, author=str(content["author"]), reason=str(content["reason"]),
                              accepted=str(content["accepted"]))  # fmt: skip


def _load(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise StoreError(f"{file}: expected JSON of `samebits perplexity`: {error}") from error
    message = schema_mistake(value.get("schema") if isinstance(value, dict) else None, SCHEMA)
    if message:
        raise StoreError(f"{file}: $.schema: {message}")
    return cast("dict[str, Any]", value)


def _measurement(value: Mapping[str, Any], file: Path) -> Measurement:
    try:
        samples = tuple(sorted(Sample(**item) for item in value["samples"]))
        for sample in samples:
            float.fromhex(sample.nll)
        names = ("corpus", "corpus_digest", "whole", "engine", "model", "host")
        return Measurement(**{name: value[name] for name in names}, samples=samples,
                           fingerprint=Fingerprint.from_json(value["fingerprint"]))  # fmt: skip
    except (KeyError, TypeError, ValueError) as error:
        raise StoreError(f"{file}: expected a measurement, but {error}; measure again") from error
