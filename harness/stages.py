"""Orders cases into stages: one engine process each, and a forced case after the one it is forced along.

It does not know cells or how a case is run. Rules: every case is in exactly one stage; natural cases of a lifetime, and
so floors, stay together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from harness.case import Case, Lifetime
from harness.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One engine process and the cases it runs, in order."""

    lifetime: Lifetime
    cases: tuple[str, ...]


def order_stages(cases: Mapping[str, Case]) -> tuple[Stage, ...]:
    """Groups cases by lifetime so that a case follows the one it is forced along.

    Each lifetime is one stage unless two lifetimes wait for each other; then one of them runs what it can and its
    forced cases follow in a second process of the same configuration (natural cases, and so floors, stay together).
    """
    waiting: dict[str, list[str]] = {}
    lifetimes: dict[str, Lifetime] = {}
    for case_id, case in cases.items():
        lifetimes[case.lifetime.id] = case.lifetime
        waiting.setdefault(case.lifetime.id, []).append(case_id)
    done: set[str] = set()
    stages: list[Stage] = []
    while waiting:
        ready = {key: _runnable(ids, cases, done) for key, ids in waiting.items()}
        whole = [key for key, ids in waiting.items() if len(ready[key]) == len(ids)]
        chosen = whole[0] if whole else max(ready, key=lambda key: len(ready[key]))
        run = ready[chosen]
        if not run:
            missing = sorted(cases[case].golden or "" for ids in waiting.values() for case in ids)
            raise UsageError(f"the plan is forced along cases it does not hold: {', '.join(missing)}")
        stages.append(Stage(lifetime=lifetimes[chosen], cases=tuple(run)))
        done.update(run)
        rest = [case for case in waiting[chosen] if case not in done]
        if rest:
            waiting[chosen] = rest
        else:
            del waiting[chosen]
    return tuple(stages)


def _runnable(ids: Sequence[str], cases: Mapping[str, Case], done: set[str]) -> list[str]:
    natural = [case for case in ids if cases[case].golden is None]
    known = done | set(natural)
    return natural + [case for case in ids if cases[case].golden is not None and cases[case].golden in known]
