"""The gate's policy: what a release demands beyond verdicts, read from TOML to the last key.

It does not decide. Rules: unknown keys, wrong types and unknown names are mistakes, all reported at once; without a
file everything blocks, an approval needs one signature, and nothing else is demanded.

    schema = 1
    [cells]        warn = ["native-*"]            cells (or labels) whose outcome warns; block = [...] wins over it
    [rules]        quick = "topk"                 the weakest rule that counts, per corpus; for its views too, unless
                                                  one is named ("quick:seeded" = "tokens")
    [least]        comparisons = 1000             elements compared, and positions witnessed, per cell
                   witnessed = 200
    [allow]        weak_corpora = true            each of these may be refused or allowed
                   comparator_only_controls = true
                   unsigned_approvals = false
                   missing_baselines = false
                   left_out_cells = true          a run of chosen cells of its matrix (`--cell`)
    [approvals]    signers = 2                    different people, different keys
                   author_alone = false           the author of the change cannot be the only signer
                   longest_days = 90
    [cost]         max_slowdown = 1.5             the most a measure of `samebits cost` may be, by the upper end of its
                   max_memory = 1.2               interval; `max_` may be left out
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Literal, cast

from harness.approval.ruling import Terms
from harness.engine import RULES, Rule
from harness.errors import UsageError
from harness.matrix import schema_mistake
from harness.reader import Reader, shown

SCHEMA = 1
Stance = Literal["block", "warn"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """What is demanded. Limits of 0 and empty mappings demand nothing."""

    source: str = "no policy file: every cell blocks"
    block: tuple[str, ...] = ()
    warn: tuple[str, ...] = ()
    rules: Mapping[str, Rule] = field(default_factory=dict)
    comparisons: int = 0
    witnessed: int = 0
    weak_corpora: bool = True
    comparator_only_controls: bool = True
    missing_baselines: bool = False
    left_out_cells: bool = True
    terms: Terms = field(default_factory=Terms)
    cost: Mapping[str, float] = field(default_factory=dict)

    def stance(self, cell: str, label: str) -> Stance:
        """Whether a cell's outcome blocks or warns."""
        if matches(self.block, cell, label):
            return "block"
        return "warn" if matches(self.warn, cell, label) else "block"

    def demanded(self, corpus: str) -> Rule | None:
        """The weakest rule that counts on a corpus or view; None: any."""
        return self.rules.get(corpus, self.rules.get(corpus_of(corpus)))


def read_policy(file: Path) -> Policy:
    """The policy in a file. Raises UsageError listing every mistake."""
    try:
        document = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"--policy {file}: cannot be read: {error.strerror}") from error
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UsageError(f"--policy {file}: not TOML: {error}") from error
    return parse_policy(document, str(file))


def parse_policy(document: Mapping[str, object], where: str) -> Policy:
    """The policy of a TOML document. Raises UsageError listing every mistake."""
    message = schema_mistake(document.get("schema"), SCHEMA)
    if message:
        raise UsageError(f"{where}: $.schema: {message}")
    reader = Reader(document)
    reader.raw("schema")
    cells, least, allow = reader.child("cells"), reader.child("least"), reader.child("allow")
    approvals = reader.child("approvals")
    policy = Policy(
        source=where, block=cells.strings("block"), warn=cells.strings("warn"),
        rules=_rules(reader.child("rules")),
        comparisons=least.natural("comparisons", 0, 0), witnessed=least.natural("witnessed", 0, 0),
        weak_corpora=_flag(allow, "weak_corpora", default=True),
        comparator_only_controls=_flag(allow, "comparator_only_controls", default=True),
        missing_baselines=_flag(allow, "missing_baselines", default=False),
        left_out_cells=_flag(allow, "left_out_cells", default=True),
        terms=_terms(approvals, unsigned=_flag(allow, "unsigned_approvals", default=False)),
        cost=_costs(reader.child("cost")),
    )  # fmt: skip
    for part in (cells, least, allow, approvals, reader):
        part.close()
    if reader.mistakes:
        raise UsageError("\n".join(f"{where}: {mistake}" for mistake in reader.mistakes))
    return policy


def _terms(reader: Reader, *, unsigned: bool) -> Terms:
    longest = reader.take("longest_days", int, None)
    if longest is not None and longest < 1:
        reader.mistake("longest_days", f"expected an integer of at least 1, got {longest}")
    signers = reader.natural("signers", 1, 1)
    if unsigned and signers > 1:
        reader.mistake("signers", f"{signers} signers cannot be demanded while unsigned approvals are allowed")
    alone = _flag(reader, "author_alone", default=True)
    return Terms(signers=signers, unsigned=unsigned, author_alone=alone, longest_days=longest)


def _rules(reader: Reader) -> dict[str, Rule]:
    rules = {name: reader.choice(name, RULES) for name in sorted(reader.table)}
    return {name: cast("Rule", rule) for name, rule in rules.items() if rule is not None}


def _costs(reader: Reader) -> dict[str, float]:
    limits: dict[str, float] = {}
    for key in sorted(reader.table):
        value, name = reader.raw(key), key.removeprefix("max_")
        if name in limits:
            reader.mistake(key, f"{name} is limited twice, with max_ and without")
        elif isinstance(value, int | float) and not isinstance(value, bool) and value > 0:
            limits[name] = float(value)
        else:
            reader.mistake(key, f"expected a number above 0, got {shown(value)}")
    return limits


def _flag(reader: Reader, name: str, *, default: bool) -> bool:
    value = reader.take(name, bool, default)
    return default if value is None else value


def corpus_of(name: str) -> str:
    """The corpus that a view is of."""
    return name.rpartition(":")[0] or name


def matches(patterns: tuple[str, ...], cell: str, label: str) -> bool:
    """Whether any pattern is the label or fits the cell's name."""
    return any(pattern == label or fnmatchcase(cell, pattern) for pattern in patterns)
