"""From a row of logits to a token: penalties, bias, masks, then argmax or a seeded draw.

It does not know batches or schedules: a row and its sequence decide the pick, nothing else. The order is that
of docs/numerics.md, section Sampling; each operation is one float32 rounding. The last part (temperature,
top-k, top-p, min-p, the draw) is the kernels'. Reported logprobs never see any of this.
"""

from __future__ import annotations

import secrets

import numpy as np

from engines.bundled.config import EngineConfig, Float32
from engines.bundled.errors import ComputeError
from engines.bundled.faults import CLONE_SAMPLES, OBSERVER_DRAWS
from engines.bundled.grammar import Allowed
from engines.bundled.kernels.interface import SamplerKernels
from engines.bundled.logits import LogitRow
from engines.bundled.philox import TARGET_STREAM, uniform
from engines.bundled.request import Sampling
from engines.bundled.sequence import Sequence

MASKED = np.float32(-np.inf)
FEW = 64  # candidates that are worth fetching instead of all logits


def _own_uniform(sequence: Sequence) -> float:
    """The number in [0, 1) that the written definition gives the sequence's next token."""
    seed = _seed_of(sequence.request.sampling)
    return uniform(seed, len(sequence.tokens), sequence.request.sample, TARGET_STREAM)


class Draws:
    """Where a request's random numbers come from. Ordinarily from its seed; every other way is a fault or is named."""

    def __init__(self, config: EngineConfig) -> None:
        """`seeding` "process" takes one seed from the operating system for everybody."""
        self._process_seed = secrets.randbits(64) if config.seeding == "process" else None
        self._cloned = config.fault == CLONE_SAMPLES
        self._shifted = config.fault == OBSERVER_DRAWS and config.observer != "none"

    def uniform(self, sequence: Sequence) -> float:
        """The number in [0, 1) for the sequence's next token."""
        seed = _seed_of(sequence.request.sampling) if self._process_seed is None else self._process_seed
        sample = 0 if self._cloned else sequence.request.sample
        return uniform(seed, len(sequence.tokens) + self._shifted, sample, TARGET_STREAM)


def pick(
    logits: Float32,
    sequence: Sequence,
    kernels: SamplerKernels,
    draws: Draws | None = None,
    allowed: Allowed | None = None,
) -> int:
    """The token the sampler takes for the sequence's next position, from raw logits (vocab,), all finite.

    `allowed` (vocab,) is a grammar's mask. Raises ComputeError, naming request and position, if shaping left no
    finite candidate.
    """
    sampling = sequence.request.sampling
    row = shape(logits, sequence, allowed)
    if sampling.temperature == 0:
        return int(kernels.argmax(row[np.newaxis])[0])
    u = draws.uniform(sequence) if draws else _own_uniform(sequence)
    return kernels.draw(row, sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p, u)


def few(sampling: Sampling) -> int:
    """How many of the largest logits decide the pick, as far as sampling alone says so: 1 at temperature 0; 0: all."""
    if sampling.temperature == 0:
        return 1
    return sampling.top_k if sampling.top_k <= FEW else 0


def pick_from(row: LogitRow, sequence: Sequence, kernels: SamplerKernels, draws: Draws | None = None) -> int:
    """The same as `pick` from a row that may lie elsewhere: where few candidates decide, nothing else is fetched."""
    sampling = sequence.request.sampling
    count = few(sampling)
    if row.whole or not count or _shapes(sampling, sequence):
        return pick(row.logits(), sequence, kernels, draws)
    if sampling.temperature == 0:
        return int(row.top(1)[0])
    ids = row.top(count)  # in order, so that ties fall as they do among all ids
    u = draws.uniform(sequence) if draws else _own_uniform(sequence)
    drawn = kernels.draw(row.values(ids), sampling.temperature, len(ids), sampling.top_p, sampling.min_p, u)
    return int(ids[drawn])


def shape(logits: Float32, sequence: Sequence, allowed: Allowed | None = None) -> Float32:
    """Logits (vocab,) after penalties, bias and masks; the argument itself when none applies."""
    sampling = sequence.request.sampling
    if allowed is None and not _shapes(sampling, sequence):
        return logits
    row = logits.copy()
    with np.errstate(all="ignore"):  # what overflows is an error below, not a warning
        _penalise(row, sampling, sequence)
        _bias(row, sampling)
    if sequence.must_go_on:
        row[sorted(sequence.stop_ids)] = MASKED
    if allowed is not None:
        row[~allowed] = MASKED
    _check_candidates(row, sequence)
    return row


def _shapes(sampling: Sampling, sequence: Sequence) -> bool:
    return (
        sampling.repetition_penalty != 1
        or sampling.frequency_penalty != 0
        or sampling.presence_penalty != 0
        or bool(sampling.logit_bias)
        or sequence.must_go_on
    )


def _penalise(row: Float32, sampling: Sampling, sequence: Sequence) -> None:
    """Repetition over prompt and output, then frequency, then presence over the output alone."""
    output = sorted(sequence.output_counts)
    if sampling.repetition_penalty != 1:
        seen = sorted({*sequence.prompt_ids, *output})
        factor = np.float32(sampling.repetition_penalty)
        row[seen] = np.where(row[seen] > 0, row[seen] / factor, row[seen] * factor)
    if sampling.frequency_penalty != 0:
        counts = np.array([sequence.output_counts[token] for token in output], np.float32)
        row[output] -= counts * np.float32(sampling.frequency_penalty)
    if sampling.presence_penalty != 0:
        row[output] -= np.float32(sampling.presence_penalty)


def _bias(row: Float32, sampling: Sampling) -> None:
    for token, bias in sampling.logit_bias:
        row[token] += np.float32(bias)


def _check_candidates(row: Float32, sequence: Sequence) -> None:
    best = row.max()  # NaN if any is
    if not np.isfinite(best):
        msg = (
            f"request {sequence.request.id!r}, generated position {sequence.generated}: the largest logit "
            f"after penalties, bias and masks is {best}; expected a finite number, check these parameters"
        )
        raise ComputeError(msg, sequence.request.id)


def _seed_of(sampling: Sampling) -> int:
    if sampling.seed is None:  # refused at submission; a draw without a seed must not fall back to anything
        msg = f"temperature {sampling.temperature} without a seed"
        raise ValueError(msg)
    return sampling.seed
