"""A capture: what a case produced, with the configuration, the fingerprint and the nonces that say how.

It does not know storage or verdicts. Rules: the process nonce is drawn once per engine process and the repetition
nonce once per case run, so that a capture that was copied instead of made is told apart.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from harness.engine import Field, Scalar

TYPE_CHECKING = False
if TYPE_CHECKING:
    from harness.traces import Traces

NOTHING_SERVED = "nothing"  # the lineage field of an engine's first work
RESIDENT = "process.resident_kib"  # memory of the engine's process when the work began
CACHE_STATE = "lineage.cache"  # the field that says what the prefix cache held before the work's prelude
CACHE_EMPTIED, CACHE_AS_LEFT = "emptied", "as left"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Capture:
    """Traces and their circumstances. `seconds` is the time the engine spent on the case."""

    case: str
    traces: Traces
    requested: Mapping[str, Scalar]
    resolved: Mapping[str, Scalar]
    observed: Mapping[str, Scalar]
    subject: tuple[Field, ...]
    process_nonce: str
    repetition_nonce: str
    session: str
    judged_digest: str
    seconds: float
