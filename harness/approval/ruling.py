"""What approvals rule about a run's differences. Pure: signatures are checked before, time is passed in.

It does not know files, ssh or reports. The rules it keeps:

1. only an approval whose cell, variant, engine and model are in the plan is called upon; others are left alone;
2. a planned cell that shows no difference calls upon none: its approvals are obsolete, and reported;
3. a difference is approved by one approval that names exactly it (kind, rule, corpus, old and new digest), is in
   force at this time, and is signed as the terms demand;
4. where no approval is good, each defective one is invalid, with its own sentence and what to do;
5. an approval that cannot be read may be for any planned cell, so it is invalid unless its folder names another.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from harness.approval.record import Approval, Kind
from harness.approval.signature import Signature


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What a policy demands of approvals. `longest_days` None: any time to expiry."""

    signers: int = 1
    unsigned: bool = False
    author_alone: bool = True  # the author of the change may be the only signer
    longest_days: int | None = None
    change_author: str | None = None  # who made this change, as CI knows it


@dataclass(frozen=True, slots=True, kw_only=True)
class Filed:
    """An approval as it lies in the folder. `approval` None: it cannot be read, and `mistake` says why.

    `folder` is the cell its folder is named for, empty at the top. `unchecked` says why signatures were not checked.
    """

    name: str
    folder: str
    approval: Approval | None
    mistake: str
    signatures: tuple[Signature, ...]
    unchecked: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scope:
    """What this run planned."""

    engine: str
    model: str
    labels: Collection[str]
    cells: Collection[str]

    def covers(self, approval: Approval) -> bool:
        """Whether the plan holds what an approval is about."""
        return (approval.engine, approval.model) == (self.engine, self.model) and approval.label in self.labels


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One difference of the run that needs an approval."""

    label: str
    kind: Kind
    rule: str
    corpus: str
    old: str
    new: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Approved:
    """A difference and the approval that covers it. `signers` is empty for an unsigned one."""

    difference: Difference
    name: str
    approval: Approval
    signers: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Noted:
    """An approval that is invalid or obsolete, and the sentence that says so."""

    name: str
    label: str
    sentence: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Rulings:
    """What the approvals come to."""

    approved: tuple[Approved, ...]
    invalid: tuple[Noted, ...]
    obsolete: tuple[Noted, ...]


def rule(
    filed: Sequence[Filed], scope: Scope, differences: Sequence[Difference], terms: Terms, now: datetime
) -> Rulings:
    """Rules on every approval; `now` is aware."""
    invalid: list[Noted] = []
    readable: list[tuple[Filed, Approval]] = []
    for item in filed:
        mistake = _unusable(item, scope)
        if mistake:
            invalid.append(Noted(name=item.name, label=item.folder, sentence=mistake))
        elif item.approval is not None and scope.covers(item.approval):
            readable.append((item, item.approval))
    approved, obsolete = [], []
    for label in sorted({approval.label for _, approval in readable}):
        mine = [pair for pair in readable if pair[1].label == label]
        shown = [difference for difference in differences if difference.label == label]
        good, bad, idle = _rule_cell(mine, shown, terms, now)
        approved += good
        invalid += bad
        obsolete += idle
    return Rulings(approved=tuple(approved), invalid=tuple(invalid), obsolete=tuple(obsolete))


def _unusable(item: Filed, scope: Scope) -> str:
    """Why an approval may not be passed over, whatever it approves; empty when it can be considered."""
    elsewhere = item.folder != "" and item.folder not in scope.cells
    if item.approval is None:
        if elsewhere:
            return ""
        return f"it cannot be read ({item.mistake}): it was changed or damaged; restore it, or approve anew"
    if item.folder and item.folder != item.approval.cell and (not elsewhere or scope.covers(item.approval)):
        return (f"it lies in the folder of cell {item.folder!r} and names cell {item.approval.cell!r}: it was moved or "
                "changed; restore it, or approve anew")  # fmt: skip
    return ""


def _rule_cell(
    mine: Sequence[tuple[Filed, Approval]], shown: Sequence[Difference], terms: Terms, now: datetime
) -> tuple[list[Approved], list[Noted], list[Noted]]:
    """(approved, invalid, obsolete) of one cell and variant."""
    if not shown:
        return [], [], [_note(item, approval, "the cell passes now; remove it") for item, approval in mine]
    good: list[Approved] = []
    faults: list[Noted] = []
    for item, approval in mine:
        difference = next((d for d in shown if d.kind == approval.kind), None)
        fault = _fault(item, approval, difference, terms, now)
        if fault or difference is None:
            faults.append(_note(item, approval, fault))
        elif not any(other.difference == difference for other in good):
            good.append(Approved(difference=difference, name=item.name, approval=approval, signers=_signers(item)))
        else:
            faults.append(_note(item, approval, "another approval covers the same difference; remove one"))
    if all(any(other.difference == difference for other in good) for difference in shown):
        return good, [], [_superseded(note) for note in faults]
    return good, faults, []


def _superseded(note: Noted) -> Noted:
    return Noted(
        name=note.name, label=note.label, sentence=f"another approval is in force ({note.sentence}); remove it"
    )


def _note(item: Filed, approval: Approval, sentence: str) -> Noted:
    return Noted(name=item.name, label=approval.label, sentence=sentence)


def _fault(item: Filed, approval: Approval, difference: Difference | None, terms: Terms, now: datetime) -> str:
    """The first thing that keeps an approval from covering a difference; empty when nothing does."""
    return (
        _signature_fault(item, approval, terms)
        or _time_fault(approval, terms, now)
        or _scope_fault(approval, difference)
    )


def _signature_fault(item: Filed, approval: Approval, terms: Terms) -> str:
    if item.unchecked and (item.signatures or not terms.unsigned):
        return f"its signature was not checked: {item.unchecked}"
    if not item.signatures:
        if terms.unsigned:
            return ""
        return "it is not signed; sign it with `samebits cosign`, or allow unsigned approvals in the policy"
    broken = next((s for s in item.signatures if not s.intact), None)
    if broken is not None:
        return (f"{broken.file} does not hold: {broken.problem}; the approval was changed after it was signed, or the "
                "signature was; restore both, or approve anew")  # fmt: skip
    signers = _signers(item)
    if not signers:
        refused = item.signatures[0]
        return (f"it is signed by a key that does not count ({refused.key}): {refused.problem}; let somebody sign who "
                "is allowed to")  # fmt: skip
    if approval.author not in signers:
        return f"it names {approval.author} as its author, who has not signed it ({', '.join(signers)} did); sign it"
    if len(signers) < terms.signers:
        return f"{len(signers)} signed and the policy asks for {terms.signers}; let another person sign it"
    if not terms.author_alone and _alone(signers, approval, terms):
        return f"only {signers[0]}, who made the change, signed it; the policy asks for another person's signature"
    return ""


def _alone(signers: tuple[str, ...], approval: Approval, terms: Terms) -> bool:
    made = {approval.change_author} | ({terms.change_author} if terms.change_author else set())
    return set(signers) <= made


def _signers(item: Filed) -> tuple[str, ...]:
    """Principals that count, each key and each name once."""
    names: dict[str, str] = {}
    for signature in item.signatures:
        if signature.signer is not None and signature.key not in names.values():
            names.setdefault(signature.signer, signature.key)
    return tuple(sorted(names))


def _time_fault(approval: Approval, terms: Terms, now: datetime) -> str:
    if now >= approval.expires:
        over = f"{approval.expires:%Y-%m-%d %H:%M} UTC"
        return f"it expired on {over}; fix the cell, or judge the difference and approve anew"
    if now < approval.created:
        return f"it is dated {approval.created:%Y-%m-%d %H:%M} UTC, in the future; check the clock, or approve anew"
    if terms.longest_days is not None and approval.expires - approval.created > timedelta(days=terms.longest_days):
        days = terms.longest_days
        return f"it runs longer than the {days} days the policy allows; approve anew with an earlier --expires"
    return ""


def _scope_fault(approval: Approval, difference: Difference | None) -> str:
    if difference is None:
        kinds = {"difference": "a difference between the arms", "drift": "a drift from the baseline"}
        return f"it approves {kinds[approval.kind]}, and the run shows another kind; judge that one and approve anew"
    for name, approved, shown in (
        ("rule", approval.rule, difference.rule),
        ("corpus", approval.corpus, difference.corpus),
    ):
        if approved != shown:
            return f"it is scoped to {name} {approved[:12]}, and the run used {shown[:12]}; approve anew"
    if (approval.old, approval.new) != (difference.old, difference.new):
        return (
            f"it approves the difference {approval.old[:12]} -> {approval.new[:12]}, and the run shows "
            f"{difference.old[:12]} -> {difference.new[:12]}: another difference; judge that one and approve anew"
        )
    return ""
