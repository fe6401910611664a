"""What adapters of offline engines check alike: settings that exist, requests that can run. It knows no engine."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping

from engines.arrivals import check_schedule
from harness.engine import Scalar, Setting, Work
from harness.errors import EngineError, Unsupported
from harness.request import Request

NEEDS_PATH = "axis 'scoring' needs golden replay: only a path that is known can be read as a prompt"
MOST_THREADS = 8  # more share one small model's step at a loss


def default_threads() -> int:
    """Threads of a process on this machine."""
    return min(len(os.sched_getaffinity(0)), MOST_THREADS)


def complete(engine: str, settings: Iterable[Setting], configuration: Mapping[str, Scalar]) -> dict[str, Scalar]:
    """Every setting with its value. Raises EngineError for a name that is none."""
    defaults = {setting.name: setting.default for setting in settings}
    unknown = sorted(set(configuration) - set(defaults))
    if unknown:
        raise EngineError(f"engine {engine!r} has no setting {unknown[0]!r}; it has {', '.join(sorted(defaults))}")
    return {**defaults, **configuration}


def own_fields(axis: str, settings: Iterable[Setting]) -> tuple[str, ...]:
    """The fingerprint fields of a setting that is an axis of the same name."""
    return (f"config.{axis}", f"resolved.{axis}") if axis in {setting.name for setting in settings} else ()


def refuse_features(request: Request, who: str, *, offered: frozenset[str]) -> None:
    """Raises Unsupported for a feature that a request needs and that is not in `offered`.

    Features: draws (a temperature above 0), grammar, images, samples, stop_strings, stop_token_ids, min_p, min_tokens,
    repetition_penalty, frequency_penalty, presence_penalty, logit_bias.
    """
    sampling = request.sampling
    needs = {
        "draws": sampling.temperature != 0,
        "grammar": request.grammar is not None,
        "images": bool(request.images),
        "samples": sampling.n != 1,
        "stop_strings": bool(sampling.stop),
        "stop_token_ids": bool(sampling.stop_token_ids),
        "min_p": sampling.min_p != 0.0 and sampling.temperature != 0,  # it cannot act on the best token
        "min_tokens": sampling.min_tokens != 0,
        "repetition_penalty": sampling.repetition_penalty != 1.0,
        "frequency_penalty": sampling.frequency_penalty != 0.0,
        "presence_penalty": sampling.presence_penalty != 0.0,
        "logit_bias": bool(sampling.logit_bias),
    }
    missing = [feature for feature, needed in needs.items() if needed and feature not in offered]
    if missing:
        raise Unsupported(f"request {request.id!r}: {', '.join(missing)}; {who} does not offer that")


def check_context(request: Request, most: int) -> None:
    """Raises EngineError for a request that is longer than the context."""
    tokens = len(request.prompt_token_ids) + request.sampling.max_tokens
    if tokens > most:
        raise EngineError(f"request {request.id!r}: {tokens} tokens of prompt and output, the context holds {most}")


def golden_paths(work: Work) -> dict[str, tuple[int, ...]]:
    """Request id to the tokens it is forced along; companions may go without. Raises EngineError."""
    check_schedule(work.schedule, [request.id for request in work.requests])
    if work.replay != "golden":
        return {}
    judged = [arrival.request for arrival in work.schedule.arrivals if not arrival.companion]
    missing = sorted(set(judged) - set(work.golden))
    if missing:
        raise EngineError(f"request {missing[0]!r}: golden replay was asked for, but no golden path was given")
    empty = sorted(name for name, path in work.golden.items() if not path)
    if empty:
        raise EngineError(f"request {empty[0]!r}: its golden path is empty")
    return dict(work.golden)
