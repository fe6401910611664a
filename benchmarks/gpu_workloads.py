"""The workloads of the GPU benchmarks, over prompts of random ids: the shapes of an 8B model and of SmolLM2.

It knows no engine. Rules: ids come from Python's seeded generator, lengths are those of the measurements of vLLM that
the rows are compared with.
"""

from __future__ import annotations

import random
import statistics
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from engines.bundled.config import ModelConfig

QWEN3_8B = ModelConfig(
    vocab_size=151936, hidden_size=4096, intermediate_size=12288, num_hidden_layers=36, num_attention_heads=32,
    num_key_value_heads=8, head_dim=128, max_position_embeddings=4096, rms_norm_eps=1e-6, rope_theta=1e6,
    tie_word_embeddings=False, bos_token_id=151643, eos_token_ids=(151645,), architecture="Qwen3ForCausalLM",
    qk_norm=True,
)  # fmt: skip
SEATS, STEP_TOKENS, PAGE = 256, 16384, 16


class Row(NamedTuple):
    """So many requests of so many prompt and new tokens, all there at once; timed `repeats` times after a first."""

    name: str
    requests: int
    prompt: int
    new: int
    repeats: int


ROWS = (
    Row("256 x (128+256)", 256, 128, 256, 2),
    Row("32 x (128+128)", 32, 128, 128, 2),
    Row("64 x (1024+1)", 64, 1024, 1, 3),
)


def random_prompt(draw: random.Random, config: ModelConfig, length: int) -> list[int]:
    """Ids away from the ends of the vocabulary."""
    return [draw.randint(10, config.vocab_size - 300) for _ in range(length)]


def census(config: ModelConfig, copies: int, new: int) -> list[tuple[bool, list[int], int]]:
    """(is a copy, prompt, new tokens): copies of one prompt of 37 tokens among 256 companions, shuffled."""
    draw = random.Random(2)
    prompt = random_prompt(draw, config, 37)
    companions = [random_prompt(draw, config, draw.randint(10, 600)) for _ in range(128)]
    lengths = random.Random(3)
    work = [(True, prompt, new)] * copies
    work += [(False, companion, lengths.choice([8, 20, 50, 90, 150, 200])) for companion in companions * 2]
    lengths.shuffle(work)
    return work


def row_figures(row: Row, times: list[float]) -> dict[str, object]:
    """Of seconds, the first of which does not count: the best, and tokens per second at it."""
    best = min(times[1:])
    return {
        "s": best, "all s": times, "output tokens/s": row.requests * row.new / best,
        "all tokens/s": row.requests * (row.new + row.prompt) / best,
    }  # fmt: skip


def single_figures(first: list[float], between: list[float]) -> dict[str, float]:
    """Of seconds to the first token, the first two of which do not count, and from token to token: medians."""
    return {
        "first token ms": 1e3 * statistics.median(first[2:]), "between tokens ms": 1e3 * statistics.median(between)
    }  # fmt: skip


def census_figures(outs: Sequence[Sequence[int]], alone: Sequence[int], new: int) -> dict[str, object]:
    """Of what every copy got, and the prompt alone: how many completions there are, and where they part."""
    counts = Counter(map(tuple, outs))
    return {
        "copies": len(outs), "new tokens": new, "distinct": len(counts),
        "first divergence": next((i for i in range(new) if len({out[i] for out in outs}) > 1), None),
        "equal to the prompt alone": counts[tuple(alone)],
        "most common": [count for _, count in counts.most_common(5)],
        "distinct after 16, 64": [len({tuple(out[:n]) for out in outs}) for n in (16, 64)],
    }  # fmt: skip


def mixed_prompts(config: ModelConfig, count: int) -> list[list[int]]:
    """Prompts of 6 to 646 tokens, for the same requests alone and together."""
    draw = random.Random(4)
    return [random_prompt(draw, config, draw.randint(6, 646)) for _ in range(count)]
