"""`census.json`: a census as plain data with a schema number. It does not know engines or how a report looks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from harness.canary import Share
from harness.census import SCHEMA, Census, PromptCensus
from harness.census.tree import Branch

Decode = Callable[[Sequence[int]], str]


def census_record(census: Census, subject: Mapping[str, object], decode: Decode) -> dict[str, object]:
    """Everything a report shows; `subject` is what was asked of whom, and `decode` gives branches their text."""
    design, seen = census.design, census.occupancy
    return {
        "schema": SCHEMA, **subject,
        "design": {"n": design.n, "seeds": design.seeds, "per_round": design.per_round, "seed": design.seed,
                   "max_tokens": design.max_tokens, "rounds": census.rounds},
        "exit_code": census.exit_code, "sentence": census.sentence, "caps": list(census.caps),
        "company": None if seen is None else {**seen.to_json(), "sentence": seen.text},
        "prompts": [_prompt(one, decode) for one in census.prompts],
    }  # fmt: skip


def _prompt(one: PromptCensus, decode: Decode) -> dict[str, object]:
    answers = one.answers
    return {
        "prompt": one.prompt, "prompt_tokens": one.prompt_tokens, "distinct": answers.distinct,
        "modal": _share(answers.modal), "first_divergence": answers.position, "gap": answers.gap,
        "margin": answers.margin, "seeds": None if one.seeds is None else _share(one.seeds),
        "seed_distinct": one.seed_distinct, "tree": [_branch(branch, decode) for branch in one.tree],
    }  # fmt: skip


def _share(share: Share) -> dict[str, object]:
    return {"count": share.count, "total": share.total, "interval": list(share.interval)}


def _branch(branch: Branch, decode: Decode) -> dict[str, object]:
    return {"depth": branch.depth, "start": branch.start, "count": branch.count, "completions": branch.completions,
            "tokens": list(branch.tokens), "text": decode(branch.tokens)}  # fmt: skip
