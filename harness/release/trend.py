"""The trend of a history as plain data: what a report shows of the last nights, pair by pair.

It does not know HTML. Rules: the newest nights are shown and the rest counted; a drift carries its onset; files that
could not be read are named.
"""

from __future__ import annotations

from collections.abc import Callable

from harness.errors import StoreError
from harness.fingerprint import Fingerprint
from harness.release.attribution import Onset, attribute
from harness.release.history import History, Night, Past

SCHEMA = 1
SHOWN = 30  # nights per pair
Opener = Callable[[str, str, str], Callable[[], Fingerprint] | None]  # (engine, model, label) to the baseline's


def trend(history: History, past: Past, opener: Opener | None = None) -> dict[str, object]:
    """Every pair's last nights, and the onsets of the drifts that the newest nights have."""
    keys = sorted({(night.engine, night.model, night.label) for night in past.nights})
    pairs = [_pair(history, past.of(*key), opener(*key) if opener else None) for key in keys]
    return {"schema": SCHEMA, "runs": len({night.run for night in past.nights}), "pairs": pairs,
            "damaged": list(past.damaged)}  # fmt: skip


def onset_of(history: History, nights: tuple[Night, ...], baseline: Callable[[], Fingerprint] | None) -> Onset | None:
    """The onset of a pair's present drift; None without one, or when its fingerprints cannot be opened."""
    try:
        return attribute(nights, history.fingerprint, baseline)
    except StoreError:
        return None


def _pair(history: History, nights: tuple[Night, ...], baseline: Callable[[], Fingerprint] | None) -> dict[str, object]:
    last = nights[-1]
    onset = onset_of(history, nights, baseline)
    return {
        "label": last.label,
        "engine": last.engine,
        "model": last.model,
        "earlier": max(0, len(nights) - SHOWN),
        "nights": [_night(night) for night in nights[-SHOWN:]],
        "onset": None if onset is None else _onset(onset),
    }


def _night(night: Night) -> dict[str, object]:
    return {"started": night.started, "run": night.run, "outcome": night.outcome, "state": night.state,
            "drifted": night.drifted, "digest": night.judged_digest, "seconds": night.seconds}  # fmt: skip


def _onset(onset: Onset) -> dict[str, object]:
    return {
        "sentence": onset.sentence,
        "last_good": onset.last_good.started if onset.last_good else None,
        "steps": [{"started": step.started, "run": step.run, "old": step.old, "new": step.new,
                   "changed": list(step.changed)} for step in onset.steps],
    }  # fmt: skip
