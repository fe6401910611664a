"""What a dialect is: one interface of one server. It sends nothing.

Rules: every sampling field is sent, or the request is refused by the field's name; a field is never left to a server's
default where the interface has a name for it; candidates are ordered by value and id, so that order tells nothing of
how a server sorts equal values.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

from engines.http.answer import Answer
from engines.http.shape import Json
from harness.errors import Unsupported
from harness.request import Message, Request


class Prompt(NamedTuple):
    """A prompt in the one form that will be sent; the others are None."""

    ids: tuple[int, ...] | None = None
    text: str | None = None
    messages: tuple[Message, ...] | None = None


class Dialect(Protocol):
    """One interface. `seed_limit` is the number of seeds it takes; larger ones are folded into it."""

    @property
    def path(self) -> str:
        """Where requests are posted."""

    @property
    def streams(self) -> bool:
        """Answers come as server-sent events."""

    @property
    def needs_done(self) -> bool:
        """A stream must end with [DONE]."""

    @property
    def takes_ids(self) -> bool:
        """Prompts may be token ids."""

    @property
    def seed_limit(self) -> int:
        """Seeds are below this."""

    def body(self, request: Request, prompt: Prompt, model: str) -> Json:
        """The request's body. Raises Unsupported for a field the interface has no word for."""

    def read(self, event: Json, answers: Sequence[Answer], at: float) -> None:
        """Takes one event, or the whole answer, into the choices. Raises ValueError for another shape."""


def ranked(pairs: Iterable[tuple[int, float]], count: int) -> list[tuple[int, float]]:
    """The `count` best candidates, by value descending and id ascending; a server may send the chosen one on top.

    Raises ValueError for an id twice.
    """
    found = sorted(pairs, key=lambda pair: (-pair[1], pair[0]))
    ids = [token for token, _ in found]
    if len(set(ids)) != len(ids):
        raise ValueError(f"token {next(i for i in ids if ids.count(i) > 1)} is twice among the top candidates")
    return found[:count]


def folded_seed(request: Request, dialect: Dialect) -> int | None:
    """The request's seed as the interface takes it: modulo `seed_limit`."""
    seed = request.sampling.seed
    return None if seed is None else seed % dialect.seed_limit


def refuse(request: Request, field: str, why: str) -> Unsupported:
    """The refusal of a field, to be raised."""
    return Unsupported(f"request {request.id!r}: {field}: {why}")


def refuse_images(request: Request) -> None:
    """No interface here is sent images. Raises Unsupported."""
    if request.images:
        raise refuse(request, "images", "this adapter sends no images")
