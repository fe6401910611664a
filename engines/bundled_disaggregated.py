"""Prefill in one process, decode in another: keys and values of each prompt are handed over.

It does not know models or kernels. Rules: this process decodes, a process of its own prefills; what is handed over is
checked by origin and digest like a stored prefix cache (`engines.bundled.parallel.handover`); a prompt's last token is
computed here, where its logits are wanted; a prompt that was not handed over is an error, never computed in silence.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from engines.bundled_adapter import harness_errors
from engines.bundled_caches import TunesNothing
from engines.bundled_child import ChildEngine
from engines.bundled_lifetime import BundledLifetime, start_lifetime
from engines.bundled_timed import NotByTheClock
from harness.engine import Field, Progress, Scalar, Work
from harness.errors import EngineError, Unsupported
from harness.prelude import build_prelude
from harness.request import Request
from harness.traces import Traces

_ALONE = ("model.digest", "arithmetic.name", "arithmetic.definition", "kernels.digest")  # must be the same in both


class Disaggregated(TunesNothing, NotByTheClock):
    """Implements `harness.engine.Engine`: a decoding engine here, a prefilling one beside it."""

    form = "disaggregated=on"

    def __init__(self, decode: BundledLifetime, prefill: ChildEngine, folder: tempfile.TemporaryDirectory[str]) -> None:
        """The folder, which hand-overs go through, goes with the engine. Raises EngineError if the two differ."""
        self._decode, self._prefill, self._folder = decode, prefill, folder
        self._handed_tokens = 0
        theirs = {field.name: field.value for field in prefill.subject}
        for field in decode.fingerprint():
            if field.name in _ALONE and theirs.get(field.name) != field.value:
                raise EngineError(
                    f"{prefill.role}: {field.name}: expected {field.value!r} as where it is decoded, "
                    f"found {theirs.get(field.name)!r}"
                )

    def resolved(self) -> Mapping[str, Scalar]:
        """As of the decoding process."""
        return self._decode.resolved()

    def observed(self) -> Mapping[str, Scalar]:
        """As of the decoding process, and how many prompt tokens it was handed so far."""
        return {**self._decode.observed(), "handed_over_tokens": self._handed_tokens}

    def fingerprint(self) -> tuple[Field, ...]:
        """As of the decoding process; the other one was checked to be the same."""
        return self._decode.fingerprint()

    def generate(self, work: Work, progress: Progress) -> Traces:
        """Prefills everything in the other process, takes it over, decodes."""
        place = Path(self._folder.name) / "handover"
        self._prefill.save(plain_prompts(work.requests), place)
        inbox = self._decode.engine.scheduler.inbox
        if inbox is None:
            raise EngineError("disaggregated: this engine was not started to be handed anything")
        with harness_errors():
            inbox.load(place)
        traces = self._decode.generate(work, progress)
        _check_handed(traces)
        self._handed_tokens += int(traces.requests.cached_tokens.sum())
        return traces

    def stop(self) -> None:
        """Ends the other process."""
        self._prefill.close()
        self._decode.stop()
        self._folder.cleanup()


def start_disaggregated(model: str, settings: Mapping[str, Scalar], environment: Mapping[str, str]) -> Disaggregated:
    """Starts both processes. Raises EngineError, ModelError, Unsupported."""
    if settings["prefix_cache"]:
        raise Unsupported("disaggregated with prefix_cache: a prompt would come from one or the other; choose one")
    decode = start_lifetime(model, settings)
    folder = tempfile.TemporaryDirectory(prefix="samebits-handover-")
    prefill: ChildEngine | None = None
    try:
        plain = {**settings, "disaggregated": "prefill", "fault": "none"}
        prefill = ChildEngine("prefill process", model, plain, environment, Path(folder.name) / "prefill")
        return Disaggregated(decode, prefill, folder)
    except BaseException:
        if prefill is not None:
            prefill.close()
        folder.cleanup()
        raise


def plain_prompts(requests: Sequence[Request]) -> tuple[Request, ...]:
    """The same prompts, each to generate one token that nobody reads."""
    return build_prelude("warm", requests, ())


def _check_handed(traces: Traces) -> None:
    """Raises EngineError naming a request whose prompt was computed here although it was to be handed over."""
    table = traces.requests
    for name, prompt, found in zip(table.id, table.prompt_tokens.tolist(), table.cached_tokens.tolist(), strict=True):
        if found != prompt - 1:
            raise EngineError(
                f"request {name!r}: {found} of {prompt - 1} prompt tokens were handed over; raise num_pages"
            )
