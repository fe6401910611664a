"""Scores a finished run's captures: points per arm, and item by item what moved between reference and variant.

It does not know how a report looks. Rules: every pair of the run is told, with the reason where it cannot be scored; an
answer that changed without changing its points is told too; the score stands beside the verdict and changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from harness.evaluation.judges import Judgement, Output
from harness.evaluation.key import Item
from harness.judged import find_judged
from harness.traces import NO_TOKEN

if TYPE_CHECKING:
    from harness.traces import Traces

SCHEMA = 2
RULES = "rules"  # who judged, where no model did
Decode = Callable[[Sequence[int]], str]
Encode = Callable[[str], tuple[int, ...]]
Judge = Callable[[Item, Output], Judgement]


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    """One item of which the answers of two arms differ; `same_points` where the drift cost nothing."""

    request: str
    reference: Judgement
    variant: Judgement

    @property
    def points(self) -> int:
        """What the item gained or lost."""
        return self.variant.points - self.reference.points


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredArms:
    """Two arms of a pair with the items both of them answered (a control may run on fewer)."""

    label: str
    arms: str  # "pair" | "control"
    verdict: str
    items: tuple[Item, ...]
    questions: Mapping[str, str]  # what was asked, by request
    outputs: tuple[Mapping[str, Output], Mapping[str, Output]]


@dataclass(frozen=True, slots=True, kw_only=True)
class PairScore:
    """Two arms of one pair, or of its control. `total` is how many items there are.

    `judged_by` is "rules" or a model judge's name; `mark` says why such a judge's score is not known to repeat.
    """

    label: str
    arms: str  # "pair" | "control"
    judged_by: str
    mark: str
    verdict: str
    total: int
    reference: int
    variant: int
    moved: tuple[Moved, ...]

    @property
    def sentence(self) -> str:
        """The score beside the verdict, in words."""
        gained = sum(one.points for one in self.moved if one.points > 0)
        lost = -sum(one.points for one in self.moved if one.points < 0)
        name = self.label if self.arms == "pair" else f"control of {self.label}"
        text = f"{name}: {self.reference} and {self.variant} of {self.total} points"
        text = f"{text}; {len(self.moved)} answers moved, {gained} points gained, {lost} lost; {self.verdict}"
        text = text if self.judged_by == RULES else f"by judge {self.judged_by}: {text}"
        return f"{text}; {self.mark}" if self.mark else text

    def to_json(self) -> dict[str, object]:
        """For `eval.json`."""
        return {
            "label": self.label, "arms": self.arms, "judged_by": self.judged_by, "mark": self.mark,
            "verdict": self.verdict, "total": self.total,
            "reference": self.reference, "variant": self.variant, "sentence": self.sentence,
            "moved": [
                {"request": one.request, "points": one.points, "reference": one.reference.saw,
                 "variant": one.variant.saw} for one in self.moved
            ],
        }  # fmt: skip


def score_pair(arms: ScoredArms, judge: Judge, *, judged_by: str = RULES, mark: str = "") -> PairScore:
    """The score of two arms over their items."""
    both = [
        (item, arms.outputs[0][item.request], arms.outputs[1][item.request])
        for item in arms.items
        if judged_by != RULES or item.by_rule
    ]
    judged = [(item, a.text != b.text, judge(item, a), judge(item, b)) for item, a, b in both]
    moved = tuple(
        Moved(request=item.request, reference=here, variant=there)
        for item, other, here, there in judged
        if other or here != there
    )
    return PairScore(
        label=arms.label, arms=arms.arms, judged_by=judged_by, mark=mark, verdict=arms.verdict, total=len(judged),
        reference=sum(here.points for _, _, here, _ in judged),
        variant=sum(there.points for _, _, _, there in judged), moved=moved,
    )  # fmt: skip


def read_outputs(traces: Traces, decode: Decode, encode: Encode) -> dict[str, Output]:
    """What each judged request got, by its id; the first sample of each."""
    judged, positions = find_judged(traces), traces.positions
    found: dict[str, Output] = {}
    for key, start, length in zip(judged.keys, judged.starts.tolist(), judged.lengths.tolist(), strict=True):
        if key.sample:
            continue
        first: dict[int, float] = {}
        if positions.topk_ids is not None and positions.topk_logprobs is not None:
            pairs = zip(positions.topk_ids[start].tolist(), positions.topk_logprobs[start].tolist(), strict=True)
            first = {token: value for token, value in pairs if token != NO_TOKEN}
        tokens = positions.token[start : start + length].tolist()
        found[key.id] = Output(text=_without_end(decode(tokens)), first=first, encode=encode)
    return found


def _without_end(text: str) -> str:
    """The text up to the first end-of-turn marker that a tokenizer writes out."""
    for marker in ("<|im_end|>", "<|endoftext|>", "</s>"):
        text = text.split(marker, 1)[0]
    return text
