"""The rules, one file per engine or subject: data, and small pure functions that look for it."""

from __future__ import annotations

from harness.doctor.finding import Rule
from harness.doctor.rules import (
    collectives,
    deepinfer,
    flags,
    hosted,
    images,
    meta,
    replicas,
    seeds,
    sglang,
    speculation,
    tensorrt_llm,
    torch_flags,
    vllm,
)

RULES: tuple[Rule, ...] = (
    *flags.RULES,
    *vllm.RULES,
    *sglang.RULES,
    *deepinfer.RULES,
    *tensorrt_llm.RULES,
    *collectives.RULES,
    *torch_flags.RULES,
    *seeds.RULES,
    *hosted.RULES,
    *speculation.RULES,
    *replicas.RULES,
    *images.RULES,
    *meta.RULES,
)

RULES_BY_ID = {rule.id: rule for rule in RULES}
