"""Scores a finished run's captures: points per arm, and item by item what moved between reference and variant.

It does not know how a report looks. Rules: every pair of the run is told, with the reason where it cannot be scored; an
answer that changed without changing its points is told too; the score stands beside the verdict and changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from harness.evaluation.judges import Judgement, Output, judge
from harness.evaluation.key import Item
from harness.judged import find_judged
from harness.traces import NO_TOKEN

if TYPE_CHECKING:
    from harness.traces import Traces

SCHEMA = 1
Decode = Callable[[Sequence[int]], str]
Encode = Callable[[str], tuple[int, ...]]


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
class PairScore:
    """Two arms of one pair, or of its control. `total` is how many items there are."""

    label: str
    arms: str  # "pair" | "control"
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
        return f"{text}; {len(self.moved)} answers moved, {gained} points gained, {lost} lost; {self.verdict}"

    def to_json(self) -> dict[str, object]:
        """For `eval.json`."""
        return {
            "label": self.label, "arms": self.arms, "verdict": self.verdict, "total": self.total,
            "reference": self.reference, "variant": self.variant, "sentence": self.sentence,
            "moved": [
                {"request": one.request, "points": one.points, "reference": one.reference.saw,
                 "variant": one.variant.saw} for one in self.moved
            ],
        }  # fmt: skip


def score_pair(
    label: str, arms: str, verdict: str, key: Sequence[Item], outputs: tuple[Mapping[str, Output], Mapping[str, Output]]
) -> PairScore:
    """The score of two arms over the items both of them answered (a control may run on fewer)."""
    items = [item for item in key if item.request in outputs[0] and item.request in outputs[1]]
    both = [(item, judge(item, outputs[0][item.request]), judge(item, outputs[1][item.request])) for item in items]
    texts = [(outputs[0][item.request], outputs[1][item.request]) for item in items]
    moved = tuple(
        Moved(request=item.request, reference=here, variant=there)
        for (item, here, there), (a, b) in zip(both, texts, strict=True)
        if a.text != b.text or here != there
    )
    return PairScore(
        label=label, arms=arms, verdict=verdict, total=len(items), reference=sum(here.points for _, here, _ in both),
        variant=sum(there.points for _, _, there in both), moved=moved,
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
