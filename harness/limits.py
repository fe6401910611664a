"""What an engine says may be claimed of it at most, read from what a capture observed.

It does not know engines or rules of comparison. Rules: an engine states limits among its observed values, under the
names below; a stated limit can only weaken a verdict; what is not stated limits nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from harness.capture import Capture
from harness.engine import RULES, Rule

RULE = "limit.rule"  # the strongest rule the engine's evidence can be judged under
RULE_REASON = "limit.rule_reason"
SAMPLING = "limit.sampling"  # why equal seeds are not known to give equal draws
COMPANY = "limit.company"  # how it is known who ran beside whom, where no step table of the engine's shows it
MIXED = "limit.mixed"  # answers that came from more than one system
ROUNDED = "limit.rounded"  # numbers that lost bits on the way
PICKS = "limit.picks"  # where logprobs and picks come from, if not from tokens as they were generated
_ALWAYS = (SAMPLING, MIXED, ROUNDED, PICKS)


def refused_rule(captures: Sequence[Capture], rule: Rule) -> str | None:
    """Why the captures cannot be judged under `rule`, or None."""
    for capture in captures:
        most = capture.observed.get(RULE)
        if most in RULES and RULES.index(rule) > RULES.index(most):
            reason = capture.observed.get(RULE_REASON, "")
            return f"rule {rule!r} cannot be judged here, {most!r} is the strongest that can: {reason}"
    return None


def stated_limits(captures: Sequence[Capture], *, company: bool) -> tuple[str, ...]:
    """What must be said with any verdict on these captures, each sentence once.

    `company`: the verdict rests on who ran beside whom.
    """
    names = (*_ALWAYS, COMPANY) if company else _ALWAYS
    told = [_sentence(name, capture) for capture in captures for name in names if name in capture.observed]
    return tuple(dict.fromkeys(told))


def unsolved_sampling(captures: Sequence[Capture]) -> str | None:
    """Why the sampling layer is unsolved, if an engine says so."""
    return next((str(one.observed[SAMPLING]) for one in captures if SAMPLING in one.observed), None)


def _sentence(name: str, capture: Capture) -> str:
    text = str(capture.observed[name])
    return f"the sampling layer is unsolved: {text}" if name == SAMPLING else text
