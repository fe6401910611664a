"""Sampling parameters: every request has a seed of its own, as the engine's contract asks."""

import zlib

from deepinfer.sampling_params import SamplingParams


def params_for(request: dict) -> SamplingParams:
    """Parameters with a seed that depends on the request's id alone."""
    return SamplingParams(
        temperature=0.7,
        top_p=0.95,
        max_tokens=512,
        seq_seed=zlib.crc32(request["id"].encode()),
    )
