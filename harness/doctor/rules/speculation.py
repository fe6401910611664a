"""Speculative decoding: drafts whose length follows batch or content, and any draft under a deterministic mode."""

from __future__ import annotations

import json
from collections.abc import Iterator

from harness.doctor.finding import Hit, Rule, Severity
from harness.doctor.launch import Launch

_VLLM = ("speculative_config", "spec_config")
_VARIABLE_METHODS = frozenset({"ngram", "ngram_gpu", "suffix", "[ngram]", "dspark"})
_VARIABLE_KEYS = (
    "disable_by_batch_size",
    "speculative_disable_by_batch_size",
    "draft_confidence_threshold",
    "num_speculative_tokens_per_batch_size",
)


def _describe(launch: Launch) -> tuple[str, str]:
    """(option, why its length varies or "") of a speculative configuration; ("", "") without one."""
    if launch.engine == "sglang":
        return _describe_sglang(launch)
    for name in _VLLM:
        given = launch.option(name)
        if given is not None and given not in ("none", "?"):
            return name, _variable_part(given)
    for name in ("speculative_model", "num_speculative_tokens"):
        if launch.option(name) not in (None, "none"):
            varies = "its length follows the batch size" if launch.option("speculative_disable_by_batch_size") else ""
            return name, varies
    return "", ""


def _describe_sglang(launch: Launch) -> tuple[str, str]:
    name = "speculative_algorithm"
    given = launch.option(name)
    if given in (None, "none"):
        return "", ""
    varies = "n-gram drafts vary in length" if (given or "").upper() == "NGRAM" else ""
    if launch.option("speculative_adaptive") not in (None, "false"):
        varies = "the draft length adapts"
    return name, varies


def _variable_part(text: str) -> str:
    try:
        table = json.loads(text)
    except (ValueError, RecursionError):
        return ""
    if not isinstance(table, dict):
        return ""
    method = str(table.get("method", table.get("model", ""))).lower()
    if method in _VARIABLE_METHODS:
        return f"{method} drafts vary in length"
    key = next((key for key in _VARIABLE_KEYS if table.get(key)), "")
    return f"{key} makes the length follow the load" if key else ""


def find_variable(launch: Launch) -> Iterator[Hit]:
    """Drafts of variable length."""
    name, varies = _describe(launch)
    if name and varies:
        yield Hit(launch.options[name].place, f"--{name.replace('_', '-')}: {varies}", name)


def find_draft(launch: Launch) -> Iterator[Hit]:
    """Any draft under a deterministic mode."""
    name, varies = _describe(launch)
    if name and not varies and launch.mode_on:
        yield Hit(
            launch.options[name].place, f"--{name.replace('_', '-')} verifies k+1 tokens at once under the mode", name
        )


RULES = (
    Rule(
        id="speculative-variable-length",
        engine="any",
        severity=Severity.ERROR,
        title="A draft of variable length",
        why="The number of rows in the verification step follows content or load, and with it the kernels.",
        mend="Use a fixed draft length, or none.",
        facts="vllm#41758: n-gram speculation changed greedy output in 20 of 20 pairs",
        launch=find_variable,
    ),
    Rule(
        id="speculative-draft",
        engine="any",
        severity=Severity.WARNING,
        title="Speculative decoding under a deterministic mode",
        why="Verification (k+1 rows) and plain decoding (one row) disagree: up to 5.25 nats between launches.",
        mend="Turn it off where bits must match, or show with a matrix that they do.",
        facts="vLLM RFC 54506, PR 52522 (open); sglang#39597",
        launch=find_draft,
    ),
)
