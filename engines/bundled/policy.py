"""Scheduling policies: in which order sequences run, and so which one gives its pages back first.

They know nothing but the sequence. Rules: a rank is fixed once a sequence is submitted; ties go to the earlier one;
the first in rank always moves, the last is preempted first. Under a preemptive policy one that runs gives way to one
that waits if the first number of its rank is larger; the second alone takes nobody's seat.
"""

from __future__ import annotations

from collections.abc import Callable

from engines.bundled.sequence import Sequence

Rank = tuple[int, int]


def _first_come(sequence: Sequence) -> Rank:
    return 0, sequence.number


def _priority(sequence: Sequence) -> Rank:
    return sequence.request.priority, sequence.number


def _shortest(sequence: Sequence) -> Rank:
    return len(sequence.request.prompt), sequence.number


POLICIES: dict[str, Callable[[Sequence], Rank]] = {
    "fcfs": _first_come,  # first come, first served
    "priority": _priority,  # the request's own priority, lower first
    "shortest": _shortest,  # the shortest prompt first
}
PREEMPTIVE = ("priority",)  # while `priority_preempts` is on
