"""Says in which layer a difference arose, and puts it in five lines.

It does not decide verdicts and does not compare: it reads one comparison, and optionally a deeper one of the same pair.
Rules: equal distributions with other picks are the sampling layer; other distributions are the forward layer, or the
axis's home where that is parallelism or environment; what the compared evidence cannot tell apart is put to the
axis's home, and the reason says that it was not told apart.
"""

from __future__ import annotations

from dataclasses import dataclass

from harness.axis import Layer
from harness.compare import Comparison
from harness.compare.divergence import Flip
from harness.compare.fields import FieldName

DISTRIBUTION_FIELDS: tuple[FieldName, ...] = ("logprob", "topk_ids", "topk_logprobs", "tensors")


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """The layer, one sentence why, and five lines: what differs, where first, how many, how large, which layer."""

    layer: Layer
    reason: str
    lines: tuple[str, str, str, str, str]

    @property
    def text(self) -> str:
        """The five lines as one text."""
        return "\n".join(self.lines)


def diagnose(comparison: Comparison, home: Layer, deeper: Comparison | None = None) -> Diagnosis:
    """Diagnoses a comparison whose outcome is `different`; `home` is the axis's layer.

    `deeper` is the same pair under the strongest rule its captures allow (`compare.strongest_rule`), for cells
    judged under a rule that leaves the distributions out. Raises ValueError if nothing differs.
    """
    if comparison.outcome == "same":
        raise ValueError("there is nothing to diagnose: the comparison found no difference")
    layer, reason = find_layer(deeper or comparison, home)
    return Diagnosis(
        layer=layer,
        reason=reason,
        lines=(
            f"what: {_what(comparison)}",
            f"first: {_where(comparison)}",
            f"count: {_count(comparison)}",
            f"size: {_size(comparison)}",
            f"layer: {layer}: {reason}",
        ),
    )


def find_layer(comparison: Comparison, home: Layer) -> tuple[Layer, str]:
    """The layer and the reason, from what was compared."""
    moved = [name for name in DISTRIBUTION_FIELDS if comparison.differing(name)]
    forward: Layer = home if home in ("parallelism", "environment") else "forward"
    if moved:
        named = " and ".join(_NAMES[name] for name in moved)
        whose = f", and the axis's home is {home}" if forward == home else ""
        return forward, f"{named} differ in the same context{whose}"
    if not comparison.differing(comparison.choice):
        return (
            "sampling",
            "every token and every compared distribution agree; only where the output ends differs",
        )
    if _saw_distributions(comparison):
        return "sampling", f"the distributions agree at every flip, only the {comparison.choice}s differ"
    return (
        home,
        f"no distribution was compared at the flip, so the axis's home stands in (rule {comparison.rule})",
    )


def _saw_distributions(comparison: Comparison) -> bool:
    """Whether the evidence at a flip shows the distribution itself; a chosen logprob does so in golden replay only."""
    compared = {count.field for count in comparison.fields if count.compared}
    if {"topk_logprobs", "tensors"} & compared:
        return True
    return comparison.replay == "golden" and "logprob" in compared


_NAMES = {
    "token": "tokens",
    "pick": "the sampler's picks",
    "logprob": "chosen logprobs",
    "topk_ids": "top-k ids",
    "topk_logprobs": "top-k logprobs",
    "tensors": "logits digests",
    "finish_reason": "finish reasons",
    "length": "lengths",
}


def _what(comparison: Comparison) -> str:
    parts = [
        f"{_NAMES[count.field]} at {count.differing} of {count.compared} {count.unit}"
        for count in comparison.fields
        if count.differing
    ]
    return f"{', '.join(parts)} (rule {comparison.rule}, {comparison.replay} replay)"


def _where(comparison: Comparison) -> str:
    first = comparison.first
    if first is None:
        return "nowhere"
    return (
        f"request {first.key} position {first.position}: {_NAMES[first.field]}"
        f" {first.reference} became {first.variant}{_flip(comparison.magnitude.first_flip)}"
    )


def _flip(flip: Flip | None) -> str:
    if flip is None:
        return "; no pick flipped"
    gap = "unknown gap" if flip.gap is None else f"top-1/top-2 gap {flip.gap:.3g}"
    return f"; first flip in {flip.key} at {flip.position}: {flip.tie} ({gap})"


def _count(comparison: Comparison) -> str:
    apart = f", {comparison.incomparable} not comparable" if comparison.incomparable else ""
    return (
        f"{len(comparison.differing_requests)} of {comparison.requests} requests, "
        f"{comparison.differing_positions} of {comparison.positions} positions{apart}"
    )


def _size(comparison: Comparison) -> str:
    size = comparison.magnitude
    if size.max_ulp is None or size.max_delta is None:
        return "no logprob of the same token to measure"
    text = f"at most {size.max_ulp} ulp, {size.max_delta:.3g} nats"
    if size.kl_k3 is not None and size.kl_k1 is not None:
        text += f"; KL estimated from chosen tokens: k1 {size.kl_k1:.3g}, k3 {size.kl_k3:.3g} nats per token"
    if size.not_finite:
        text += f"; {size.not_finite} pairs are not finite"
    return text
