"""A model of an 8B shape whose weights follow from a seed: made on a GPU when it is opened, stored nowhere.

It reads nothing. Rules: every weight is integer arithmetic, one exact subtraction, one product and one rounding to
bfloat16, so that the weights are the same on every device and with every library, and the digest names the rule.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NoReturn

import numpy as np
import numpy.typing as npt

from engines.bundled.config import Float32, Model, ModelConfig
from engines.bundled.errors import NotSupported
from engines.bundled.models.tensors import tensor_shapes
from engines.bundled.models.tiny import GOLDEN, MadeSource, mix
from engines.bundled.tokenizer import ByteTokenizer

NAME = "qwen3-8b-random"
SEED = 21
RULE = 1  # version of how a weight follows from the seed
SPREAD = 0.02  # standard deviation of every matrix; gains of norms are 1
WIDTH = np.float32(SPREAD * 12**0.5)  # of the uniform distribution with that deviation
CONFIG = ModelConfig(
    vocab_size=151936,
    hidden_size=4096,
    intermediate_size=12288,
    num_hidden_layers=36,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    max_position_embeddings=4096,
    rms_norm_eps=1e-6,
    rope_theta=1e6,
    tie_word_embeddings=False,
    bos_token_id=ByteTokenizer.BEGIN,
    eos_token_ids=(ByteTokenizer.END,),
    architecture="Qwen3ForCausalLM",
    qk_norm=True,
)
DESCRIPTION = "seeded random Qwen3 of the 8B shape (36 layers, 151,936 ids, bytes as tokens), made on a GPU in bfloat16"
NEEDS = "made on an NVIDIA GPU with about 20 GiB free: device=cuda, dtype=bfloat16"


@dataclass(frozen=True, slots=True)
class SeededWeights(Mapping[str, Float32]):
    """The tensors by name; they can be asked for one by one, and are not kept."""

    shape: ModelConfig
    seed: int = SEED

    def __getitem__(self, name: str) -> Float32:
        raise KeyError(name) if name not in tensor_shapes(self.shape) else self._refused()

    def get(self, name: str, default: object = None) -> NoReturn:  # noqa: ARG002 - as Mapping has it
        """No tensor is handed out in this process's memory."""
        raise self._refused()

    def _refused(self) -> NotSupported:
        return NotSupported(f"model {NAME}: its weights are made on a GPU alone; set device=cuda and dtype=bfloat16")

    def __iter__(self) -> Iterator[str]:
        return iter(tensor_shapes(self.shape))

    def __len__(self) -> int:
        return len(tensor_shapes(self.shape))

    def start_of(self, name: str) -> int:
        """The seed of a tensor's own run of hashes."""
        return self.seed + (tuple(tensor_shapes(self.shape)).index(name) << 36)


@dataclass(frozen=True, slots=True)
class SeededSource(MadeSource):
    """The model as a source."""

    shape: ModelConfig = CONFIG

    def model(self) -> Model:
        """Its shape and the seed; no weight is computed."""
        weights = SeededWeights(self.shape)
        named = f"{NAME} rule {RULE} seed {weights.seed} spread {SPREAD} {self.shape}"
        digest = hashlib.sha256(named.encode()).hexdigest()
        return Model(name=NAME, config=self.shape, weights=weights, digest=digest)


def matrix_values(start: int, begin: int, count: int) -> Float32:
    """Elements `begin` to `begin + count` of a matrix before they are rounded to bfloat16, as numpy computes them."""
    with np.errstate(over="ignore"):
        index: npt.NDArray[np.uint64] = np.arange(begin + 1, begin + count + 1, dtype=np.uint64)
        bits = mix(np.uint64(start) + GOLDEN * index) >> np.uint64(40)
    unit = bits.astype(np.float32) * np.float32(2**-24)
    values: Float32 = (unit - np.float32(0.5)) * WIDTH
    return values
