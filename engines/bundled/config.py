"""What a model is (shape) and how the engine is run (options). No file formats, no arithmetic."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Float32 = npt.NDArray[np.float32]
Int32 = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """How a model stretches its rotary frequencies (docs/numerics.md, Rope).

    `linear` and `llama3` are transformers' rope types of these names; `factors` divides each frequency by a number of
    its own, as GGUF files store it.
    """

    kind: str  # "linear" | "llama3" | "factors"
    factor: float = 1.0  # linear, llama3
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    original_max_position_embeddings: int = 0  # llama3
    factors: tuple[float, ...] = ()  # factors: head_dim / 2 of them


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A Llama-family shape, with the field names of a Hugging Face config where it has one.

    Fields with a default are what only some families have; a digest leaves them out where they hold it
    (`models.digest`), so that a new field renames no older model.
    """

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
    architecture: str = "LlamaForCausalLM"  # a name of `models.families`
    qkv_bias: bool = False  # q, k and v have biases
    qk_norm: bool = False  # each head of q and k goes through an RMSNorm of its own before rope
    rope_scaling: RopeScaling | None = None
    windows: tuple[int, ...] = ()  # per layer: keys a token sees, itself included; 0: all. Empty: all in every layer
    num_experts: int = 0  # of a mixture-of-experts MLP; 0: no layer has one
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0  # inner width of one expert
    dense_layers: tuple[int, ...] = ()  # layers of a model with experts that have an ordinary MLP

    def window(self, layer: int) -> int:
        """How many keys a token sees in this layer, itself included; 0: all."""
        return self.windows[layer] if self.windows else 0

    def has_experts(self, layer: int) -> bool:
        """True where the layer's MLP is a mixture of experts."""
        return self.num_experts > 0 and layer not in self.dense_layers

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
    dtype: str = "float32"  # of weights and products on a GPU; "bfloat16": `tensorcore` and its controls
    prefix_cache: bool = False  # pages of earlier requests are reused where all tokens up to their end are the same
    policy: str = "fcfs"  # who runs first: `engines.bundled.policy`
    priority_preempts: bool = True  # under policy "priority" one that runs gives way to a more urgent one that waits
    async_scheduling: bool = False  # the next step is scheduled while one runs
    draft: str = "off"  # who proposes tokens ahead: `engines.bundled.draft`
    draft_length: int = 4  # proposals verified in one step, at most
    draft_policy: str = "fixed"  # "fixed": always as many; "variable": more after acceptance, fewer after rejection
    rollback: str = "off"  # who is decoded fast and verified in windows: "all" requests, or as each "request" says
    scoring: str = "decode"  # a forced path is decoded token by token, or read as a prompt: "prefill"
    observer: str = "logprobs"  # "none": no log-softmax is computed and none is reported
    tensor_parallel_size: int = 1  # processes that share one model: `engines.bundled.parallel`
    expert_parallel_size: int = 1  # processes that share the experts of a mixture
    collectives: str = "gloo"  # what carries data between them: "gloo" | "nccl"
    disaggregated: str = "off"  # "prefill": keeps prompts for others; "on": goes on from what it was handed
    rendezvous_port: int = 0  # where they find each other; 0: any free port
    kv_fraction: float = 0.0  # of a card's memory after the weights that KV pages take; 0: what num_pages says
    k_order: str = "chain"  # of `tensorcore`: products over a K that ranks share are one chain, or a "tree" of chunks
    enforce_eager: bool = False  # on a GPU: every launch by itself, no recorded graphs
    seeding: str = "request"  # "process": draws ignore the request's seed for one of this process
    fault: str = "none"  # what the engine does wrong on purpose: `engines.bundled.faults`
