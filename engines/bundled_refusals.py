"""Axes that other engines vary and the bundled one does not, each with the reason.

It imports nothing heavy. Rules: an axis that is neither here nor offered is a mistake of ours, and a test says so.
"""

from __future__ import annotations

NOT_OFFERED: dict[str, str] = {
    "attention_backend": "this engine has one attention kernel per arithmetic",
    "chunked_prefill": "prompts are always prefilled in chunks: vary max_num_batched_tokens",
    "data_parallel_size": "replicas are two engines behind one front here: vary replica",
    "draft_length": "a setting of both arms here: vary draft or draft_policy",
    "dtype": "an arithmetic fixes the type of weights and activations: vary the mode",
    "enable_expert_parallel": "ranks always hold whole experts: vary expert_parallel_size",
    "kv_cache_dtype": "keys and values are kept in the type of the arithmetic",
    "padding": "sequences of different lengths share a step without padding",
    "pipeline_parallel_size": "the layers of a model are not spread over stages here",
    "prefill_replay": "a forced prompt is computed as any prompt: vary scoring",
}
