"""The picture of how far two computations of the same logprobs lie apart, over output positions.

It does not know SVG. Rules: the scale is linear and begins at 0; a line joins measured positions alone; where
everything is equal there is no picture, but a sentence.
"""

from __future__ import annotations

from typing import NamedTuple

from reports.record import Agreement
from reports.words import number, small

WIDTH, HEIGHT = 640, 200
LEFT, RIGHT, TOP, BOTTOM = 74, 12, 12, 34
TICKS = 4


class Mark(NamedTuple):
    """A labelled place on an axis."""

    at: float
    text: str


class Picture(NamedTuple):
    """Two paths (`mean`, `most`) and their axes, in pixels."""

    mean: str
    most: str
    x: tuple[Mark, ...]
    y: tuple[Mark, ...]
    width: int = WIDTH
    height: int = HEIGHT


def draw_agreement(agreement: Agreement) -> Picture | None:
    """None where nothing differs or nothing is on record."""
    rows = [row for row in agreement.by_position if None not in (row.position, row.mean, row.most)]
    top = max((row.most or 0.0 for row in rows), default=0.0)
    if top <= 0.0:
        return None
    last = max(1, *(row.position or 0 for row in rows))
    xs = [LEFT + (WIDTH - LEFT - RIGHT) * (row.position or 0) / last for row in rows]

    def path(values: list[float]) -> str:
        places = (f"{x:.1f} {_height(value / top):.1f}" for x, value in zip(xs, values, strict=True))
        return "M" + " L".join(places)

    return Picture(
        mean=path([row.mean or 0.0 for row in rows]),
        most=path([row.most or 0.0 for row in rows]),
        x=tuple(
            Mark(LEFT + (WIDTH - LEFT - RIGHT) * tick / last, str(tick))
            for tick in sorted({last * step // TICKS for step in range(TICKS + 1)})
        ),
        y=tuple(Mark(_height(step / TICKS), small(top * step / TICKS)) for step in range(TICKS + 1)),
    )


def agreement_words(agreement: Agreement) -> str:
    """The numbers in one sentence."""
    if agreement.tokens is None:
        return "not recorded"
    parts = [f"{number(agreement.equal)} of {number(agreement.tokens)} logprobs have the same bits"]
    named = (
        ("KL k1", agreement.kl_k1), ("k3", agreement.kl_k3), ("largest |Δlogprob|", agreement.max_delta),
        ("mean", agreement.mean_delta),
    )  # fmt: skip
    parts += [f"{name} {small(value)}" for name, value in named if value is not None]
    if agreement.perplexity_ratio is not None:
        parts.append(f"perplexity ratio {agreement.perplexity_ratio:.9g}")
    if agreement.pearson is not None:
        parts.append(f"Pearson {agreement.pearson:.12g}")
    return ", ".join(parts)


def _height(share: float) -> float:
    return TOP + (HEIGHT - TOP - BOTTOM) * (1.0 - share)
