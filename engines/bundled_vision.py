"""The vision encoder as the harness runs it: requests bring images, each step packs one image of each running request.

It does not judge or store. Rules: a request's positions are the patches of its images, in order, and each is reported
as a position of a language model is, its embedding in the place of logits: digest over all numbers, index of the
largest, log-softmax and candidates; the one prompt token a request carries stands for the pictures and is not read;
image bytes are found by their SHA-256 among the shipped corpora and checked; a setting that means nothing to an encoder
is refused unless it has its default.
"""

from __future__ import annotations

import hashlib
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import numpy as np

from engines.arrivals import Arrivals, Standing
from engines.bundled.errors import ModelError, NotSupported, RequestError
from engines.bundled.kernels.interface import Kernels
from engines.bundled.kernels.library import load
from engines.bundled.vision.config import VisionModel
from engines.bundled.vision.encoder import Encoder
from engines.bundled.vision.picture import Patches, cut, read_png
from engines.bundled.vision.tiny_vit import tiny_vit
from engines.bundled_adapter import harness_errors
from engines.bundled_caches import TunesNothing
from harness.engine import Field, FieldClass, Progress, Scalar, Work
from harness.errors import ModelError as HarnessModelError
from harness.request import Image, Request
from harness.traces import NO_TOKEN, PositionTable, RequestTable, StepTable, Traces

READ = ("arithmetic", "compiler", "isa", "max_num_batched_tokens", "max_num_seqs", "threads", "tuning")
ARITHMETICS = ("portable", "free")
CORPORA = Path(__file__).resolve().parents[1] / "corpora"
MEDIA_TYPE = "image/png"
NOT_APPLICABLE = "not applicable"


@dataclass(slots=True, kw_only=True, eq=False)
class Album:
    """One request under way."""

    id: str
    companion: bool
    images: list[Patches]
    candidates: int  # top-k asked for
    arrival_s: float
    row: int
    done: int = 0  # images encoded
    embeddings: list[np.ndarray[tuple[int, ...], np.dtype[np.float32]]] = field(default_factory=list)
    first_s: float = 0.0
    finish_s: float = 0.0

    @property
    def patches(self) -> int:
        """Patches encoded so far."""
        return sum(map(len, self.embeddings))

    @property
    def finished(self) -> bool:
        """True once every image is encoded."""
        return self.done == len(self.images)


class VisionLifetime(TunesNothing):
    """A started encoder; implements `harness.engine.Engine`."""

    def __init__(self, model: VisionModel, kernels: Kernels, settings: Mapping[str, Scalar]) -> None:
        self._model, self._kernels, self._settings = model, kernels, settings
        self._seats, self._budget = (cast("int", settings[name]) for name in ("max_num_seqs", "max_num_batched_tokens"))
        self._encoder = Encoder(
            model, kernels, cast("str", settings["arithmetic"]), cast("int", settings["threads"]),
            cast("int", settings["tuning"]),
        )  # fmt: skip

    def resolved(self) -> Mapping[str, Scalar]:
        """The settings an encoder has, and the kernels they led to."""
        portable = self._settings["arithmetic"] == "portable"
        return {
            **{name: self._settings[name] for name in READ},
            "isa": self._kernels.isa,
            "compiler": self._kernels.compiler,
            "backend": self._kernels.backend,
            "backend_reason": self._kernels.reason,
            "kernels_digest": self._kernels.digest,
            "definition": 1 if portable else 0,
            "chunk_width": self._model.config.chunk_width if portable else "follows the step",
            "patch_size": self._model.config.patch_size,
        }

    def observed(self) -> Mapping[str, Scalar]:
        """What is so inside the process now."""
        return {
            "threads": self._kernels.threads_seen(),
            "isa": self._kernels.isa,
            "compiler": self._kernels.compiler,
            "backend": self._kernels.backend,
            "torch_imported": "torch" in sys.modules,
        }

    def fingerprint(self) -> tuple[Field, ...]:
        """Model, arithmetic and kernels."""
        portable = self._settings["arithmetic"] == "portable"
        return (
            _field("model.name", self._model.name, "model source", "context"),
            _field("model.digest", self._model.digest, "float32 weights and shape"),
            _field("model.source", "memory", "model source"),
            _field("tokenizer.digest", ImageTokenizer().digest, "the one token of a request's images"),
            _field("arithmetic.name", self._settings["arithmetic"], "setting"),
            _field("arithmetic.definition", 1 if portable else 0, "docs/numerics.md"),
            _field("kernels.digest", self._kernels.digest, "source, compiler, flags and instruction set"),
            _field("kernels.backend", self._kernels.backend, "kernels or fallback"),
        )

    def generate(self, work: Work, progress: Progress) -> Traces:
        """Encodes one work's images. Raises EngineError, Unsupported."""
        with harness_errors():
            if work.replay != "natural":
                raise NotSupported(f"replay {work.replay!r}: an encoder generates nothing that could be forced")
            images = {request.id: self._open(request) for request in work.requests}
            return _Run(self._encoder, work, images, self._seats, self._budget, progress).run()

    def stop(self) -> None:
        """Nothing is held."""

    def _open(self, request: Request) -> list[Patches]:
        if not request.images:
            raise NotSupported(f"request {request.id!r}: no image; this encoder reads images alone")
        if request.sampling.n != 1 or request.grammar is not None or request.sampling.temperature:
            raise NotSupported(f"request {request.id!r}: n, a grammar or a temperature; an encoder samples nothing")
        images = [self._cut(request, image) for image in request.images]
        total = sum(len(image.values) for image in images)
        if total != request.sampling.max_tokens:
            found = f"its images have {total} patches of {self._model.config.patch_size} pixels"
            raise RequestError(f"request {request.id!r}: max_tokens is {request.sampling.max_tokens}, {found}")
        return images

    def _cut(self, request: Request, image: Image) -> Patches:
        what, most = f"request {request.id!r}, image {image.sha256[:12]}", self._model.config.most_patches
        if image.media_type != MEDIA_TYPE:
            raise NotSupported(f"{what}: {image.media_type}; this encoder reads {MEDIA_TYPE}")
        patches = cut(read_png(image_bytes(image.sha256, what), what), self._model.config.patch_size)
        if len(patches.values) > min(most, self._budget):
            raise RequestError(f"{what}: {len(patches.values)} patches; at most {min(most, self._budget)} fit a step")
        return patches


class _Run:
    """One work: arrivals, steps and what they did."""

    def __init__(
        self, encoder: Encoder, work: Work, images: Mapping[str, list[Patches]], seats: int, budget: int,
        progress: Progress,
    ) -> None:  # fmt: skip
        self._encoder, self._images, self._seats, self._budget = encoder, images, seats, budget
        self._arrivals = Arrivals(work.schedule, images)
        self._digests, self._progress = work.logits_digests, progress
        self._candidates = {request.id: request.sampling.logprobs for request in work.requests}
        self._albums: list[Album] = []
        self._log: list[tuple[int, int, int, int]] = []  # step, row, first patch, patches
        self._step, self._begun = 0, time.perf_counter()

    def run(self) -> Traces:
        while self._arrivals.pending or any(not album.finished for album in self._albums):
            for arrival in self._arrivals.take_due(self._step, self._standings()):
                if arrival.cancel_after_tokens is not None:
                    raise NotSupported(f"request {arrival.request!r} is to be cancelled; an encoder lets all finish")
                self._albums.append(
                    Album(id=arrival.request, companion=arrival.companion, images=self._images[arrival.request],
                          candidates=self._candidates[arrival.request], arrival_s=self._now(), row=len(self._albums))
                )  # fmt: skip
            chosen = self._choose()
            if not chosen:
                self._step = max(self._step, self._arrivals.next_step())
                continue
            self._encode(chosen)
            self._step += 1
            self._progress(sum(album.finished for album in self._albums), sum(album.patches for album in self._albums))
        return self._traces()

    def _choose(self) -> list[Album]:
        """The next image of each unfinished request in order of arrival, as far as seats and patches go."""
        chosen, left = [], self._budget
        for album in [album for album in self._albums if not album.finished][: self._seats]:
            count = len(album.images[album.done].values)
            if count <= left:
                chosen.append(album)
                left -= count
        return chosen

    def _encode(self, chosen: Sequence[Album]) -> None:
        results = self._encoder.encode([album.images[album.done] for album in chosen])
        for album, embedding in zip(chosen, results, strict=True):
            if not np.isfinite(embedding).all():
                raise RequestError(f"request {album.id!r}, image {album.done}: an embedding is not finite")
            self._log.append((self._step, album.row, album.patches, len(embedding)))
            album.first_s = album.first_s or self._now()
            album.embeddings.append(np.ascontiguousarray(embedding))
            album.done += 1
            album.finish_s = self._now()

    def _standings(self) -> dict[str, Standing]:
        return {album.id: Standing(generated=album.patches, finished=album.finished) for album in self._albums}

    def _now(self) -> float:
        return time.perf_counter() - self._begun

    def _traces(self) -> Traces:
        albums, log = self._albums, np.array(self._log, np.int32).reshape(-1, 4)
        none = np.zeros(len(albums), np.int32)
        return Traces(
            requests=RequestTable(
                id=tuple(album.id for album in albums), sample=none,
                companion=np.array([album.companion for album in albums], np.bool_),
                prompt_tokens=none + 1, length=np.array([album.patches for album in albums], np.int64),
                finish_reason=("length",) * len(albums), cached_tokens=none, preemptions=none,
                arrival_s=np.array([album.arrival_s for album in albums]),
                first_token_s=np.array([album.first_s for album in albums]),
                finish_s=np.array([album.finish_s for album in albums]),
            ),
            positions=self._positions(),
            steps=StepTable(step=log[:, 0].copy(), request=log[:, 1].copy(), start=log[:, 2].copy(),
                            count=log[:, 3].copy()),
            counters=tuple(sorted({
                "max_running": int(np.bincount(log[:, 0]).max()), "preemptions": 0,
                "steps": len(np.unique(log[:, 0])), "tokens_computed": int(log[:, 3].sum()),
            }.items())),
        )  # fmt: skip

    def _positions(self) -> PositionTable:
        kernels = self._encoder.kernels
        rows = np.concatenate([np.concatenate(album.embeddings) for album in self._albums])
        logprobs = kernels.log_softmax(rows)
        asked = np.repeat([album.candidates for album in self._albums], [album.patches for album in self._albums])
        ids = kernels.top_k(rows, max(1, int(asked.max())))
        token, values = ids[:, 0].copy(), np.take_along_axis(logprobs, ids, axis=1)
        spare = np.arange(ids.shape[1])[None, :] >= asked[:, None]
        digests = b"".join(hashlib.blake2b(row.tobytes(), digest_size=16).digest() for row in rows)
        return PositionTable(
            token=token, pick=token.copy(), logprob=values[:, 0].copy(),
            topk_ids=np.where(spare, np.int32(NO_TOKEN), ids),
            topk_logprobs=np.where(spare, np.float32(np.nan), values),
            logits_digest=np.frombuffer(digests, "<u8").reshape(-1, 2).astype(np.uint64) if self._digests else None,
        )  # fmt: skip


def image_bytes(sha256: str, what: str) -> bytes:
    """An image of a shipped corpus. Raises ModelError, beginning with `what`, if it is not there or damaged."""
    for path in sorted(CORPORA.glob(f"*/images/{sha256}")):
        data = path.read_bytes()
        if hashlib.sha256(data).hexdigest() != sha256:
            raise ModelError(f"{what}: {path} is damaged; its bytes have another SHA-256")
        return data
    raise ModelError(f"{what}: no shipped corpus holds it; images of other corpora cannot be encoded")


def start_vision(settings: Mapping[str, Scalar], defaults: Mapping[str, Scalar]) -> VisionLifetime:
    """The tiny encoder. Raises NotSupported for a setting that it does not have."""
    for name in sorted(set(settings) - set(READ)):
        if settings[name] != defaults[name]:
            raise NotSupported(f"{name}={settings[name]}: an image encoder has no such setting; leave it out")
    if settings["arithmetic"] not in ARITHMETICS:
        known = ", ".join(ARITHMETICS)
        raise NotSupported(f"arithmetic={settings['arithmetic']}: the encoder computes in {known}")
    kernels = load(cast("str", settings["isa"]), cast("str", settings["compiler"]))
    return VisionLifetime(tiny_vit(), kernels, settings)


class ImageTokenizer:
    """The one token that stands for a request's images; there is no text."""

    @property
    def digest(self) -> str:
        """SHA-256 of the definition in words."""
        return hashlib.sha256(b"one token, 0, for all images of a request; no text").hexdigest()

    @property
    def vocab_size(self) -> int:
        """Ids are below this."""
        return 1

    def encode(self, text: str) -> tuple[int, ...]:
        """Raises ModelError for text."""
        if text:
            raise HarnessModelError(f"the text {text[:20]!r}: an image encoder reads no text")
        return (0,)

    def decode(self, ids: Sequence[int]) -> str:  # noqa: ARG002 - of any ids
        """Nothing: numbers of embeddings are no text."""
        return ""

    def encode_chat(self, messages: Sequence[tuple[str, str]]) -> tuple[int, ...]:
        """The one token. Raises ModelError for text."""
        return self.encode("".join(content for _, content in messages))


def _field(name: str, value: Scalar | None, source: str, field_class: FieldClass = "identity") -> Field:
    return Field(name=name, value=value, field_class=field_class, source=source)
