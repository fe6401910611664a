"""The tiny models: a seeded random Llama and a mixture of experts made in memory, for tests and first steps.

It reads nothing. Rules: every weight is integer arithmetic and one rounding, so the digest is the same on
every machine; the scales are chosen so that logits are spread, no token repeats itself for ever, and sums are
long enough for their order to show.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from engines.bundled.config import Float32, Model, ModelConfig
from engines.bundled.models.digest import model_digest
from engines.bundled.models.source import Origin
from engines.bundled.models.tensors import EMBEDDING, tensor_shapes
from engines.bundled.tokenizer import ByteTokenizer

NAME = "tiny"
DESCRIPTION = "seeded random Llama (2 layers, 512 ids, bytes as tokens), made in memory for tests"
SEED = 20
CONFIG = ModelConfig(
    vocab_size=512,
    hidden_size=64,
    intermediate_size=176,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=8192,  # text corpora grow about fourfold in bytes
    rms_norm_eps=1e-5,
    rope_theta=10000.0,
    tie_word_embeddings=True,
    bos_token_id=ByteTokenizer.BEGIN,
    eos_token_ids=(ByteTokenizer.END,),
)

MOE_NAME = "tiny-moe"
MOE_DESCRIPTION = "seeded random Qwen3-MoE (2 layers, 8 experts of which 4 answer), made in memory for tests"
MOE_CONFIG = replace(
    CONFIG,
    architecture="Qwen3MoeForCausalLM",
    qk_norm=True,
    num_experts=8,
    num_experts_per_tok=4,
    moe_intermediate_size=80,  # two chunks and a half
)

_EMBEDDING_SCALE = 0.6  # small beside what the layers add, or a tied model repeats its input
_PROJECTION_SCALE = 0.5  # queries and keys of spread 2: attention is neither flat nor one-hot
_NORM_SCALE = 0.5  # norms lie in [0.75, 1.25)
GOLDEN = np.uint64(0x9E3779B97F4A7C15)


class MadeSource:
    """What every source answers alike whose model is made from its shape, with bytes as tokens."""

    __slots__ = ()
    shape: ModelConfig

    def config(self) -> ModelConfig:
        """Its shape."""
        return self.shape

    def tokenizer(self) -> ByteTokenizer:
        """Bytes as ids."""
        return ByteTokenizer(self.shape.vocab_size)

    def origin(self) -> Origin:
        """Made in memory."""
        return Origin(kind="memory", quantisation="none")


@dataclass(frozen=True, slots=True)
class TinySource(MadeSource):
    """A tiny model as a source."""

    name: str = NAME
    shape: ModelConfig = CONFIG

    def model(self) -> Model:
        """Its weights, made anew."""
        weights = make_weights(self.shape)
        return Model(name=self.name, config=self.shape, weights=weights, digest=model_digest(self.shape, weights))


def make_weights(shape: ModelConfig = CONFIG) -> dict[str, Float32]:
    """All tensors; each from its own run of hashes, so that adding one would not move the others."""
    return {
        name: make_tensor(name, size, np.uint64(SEED + (index << 32)))
        for index, (name, size) in enumerate(tensor_shapes(shape).items())
    }


def make_tensor(name: str, shape: tuple[int, ...], seed: np.uint64) -> Float32:
    """A seeded random tensor: an embedding, a projection, or the gain of a norm (one dimension)."""
    centred = (_uniform(math.prod(shape), seed) - np.float32(0.5)).reshape(shape)  # exact
    if len(shape) == 1:
        return np.float32(1) + centred * np.float32(_NORM_SCALE)
    return centred * np.float32(_EMBEDDING_SCALE if name == EMBEDDING else _PROJECTION_SCALE)


def _uniform(count: int, seed: np.uint64) -> Float32:
    """`count` multiples of 2^-24 in [0, 1), by splitmix64 (Steele, Lea, Flood 2014)."""
    with np.errstate(over="ignore"):
        return (mix(seed + GOLDEN * np.arange(1, count + 1, dtype=np.uint64)) >> np.uint64(40)).astype(
            np.float32
        ) * np.float32(2**-24)


def mix(z: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """splitmix64's finaliser."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
