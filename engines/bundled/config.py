"""What a model is (shape) and how the engine is run (options). No file formats, no arithmetic."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Float32 = npt.NDArray[np.float32]
Int32 = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A Llama-family shape, with the field names of a Hugging Face config."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float
    tie_word_embeddings: bool
    bos_token_id: int
    eos_token_ids: tuple[int, ...]

    @property
    def chunk_width(self) -> int:
        """Width of a chunk of K in product sums: a function of the model alone (docs/numerics.md)."""
        group = self.num_attention_heads // self.num_key_value_heads
        width = group * self.head_dim if group > 1 else 256
        while width > 512:
            width //= 2
        return width


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Model:
    """Weights in float32 under Hugging Face names (`model.layers.0.self_attn.q_proj.weight`, (out, in))."""

    name: str
    config: ModelConfig
    weights: Mapping[str, Float32]
    digest: str  # SHA-256 over config and weights


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Every option of the engine, explicit. Defaults live in the adapter's settings, not here."""

    arithmetic: str  # "portable" | "free" | "native"
    max_num_seqs: int  # sequences in one step
    max_num_batched_tokens: int  # tokens in one step; a longer prompt is prefilled in chunks
    page_size: int  # tokens per KV page
    num_pages: int  # KV pages in the pool
    threads: int
    isa: str  # "auto" | "x86-64-v3" | "x86-64-v4" | "generic"
    compiler: str  # "auto" | "g++" | "clang++" | "none" (none: the checked fallback without own kernels)
    tuning: int  # an autotuner's choice; moves the order of sums in `free` only
    prefix_cache: bool = False  # pages of earlier requests are reused where all tokens up to their end are the same
    policy: str = "fcfs"  # who runs first: `engines.bundled.policy`
    async_scheduling: bool = False  # the next step is scheduled while one runs
    draft: str = "off"  # who proposes tokens ahead: `engines.bundled.draft`
    draft_length: int = 4  # proposals verified in one step, at most
    draft_policy: str = "fixed"  # "fixed": always as many; "variable": more after acceptance, fewer after rejection
    rollback: str = "off"  # "all" or every other ("alternate") request is decoded fast, and verified in windows
    scoring: str = "decode"  # a forced path is decoded token by token, or read as a prompt: "prefill"
    observer: str = "logprobs"  # "none": no log-softmax is computed and none is reported
    seeding: str = "request"  # "process": draws ignore the request's seed for one of this process
    fault: str = "none"  # what the engine does wrong on purpose: `engines.bundled.faults`
