"""The model families this engine computes, as a table: what a config.json of each may say. It reads no files.

Rules: a field that can change the arithmetic is read, or pinned to the one value that is computed; a field that this
table does not know is refused, because nobody can tell what it changes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Windows = Literal["none", "every layer", "chosen layers"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One architecture: its names, and what sets it apart from Llama."""

    architecture: str  # of config.json
    model_type: str
    gguf: str | None  # general.architecture of GGUF files; None: they come under another family's
    qkv_bias: bool = False
    qk_norm: bool = False
    windows: Windows = "none"  # which layers may have a sliding window
    experts: bool = False
    head_dim: int = 0  # where config.json leaves it out; 0: hidden_size / num_attention_heads
    permuted: bool = False  # GGUF stores query and key rows in another order
    reads: frozenset[str] = frozenset()  # fields beside COMMON


_CHOSEN = frozenset({"sliding_window", "use_sliding_window", "max_window_layers", "layer_types"})
_EXPERTS = frozenset(
    {"num_experts", "num_local_experts", "num_experts_per_tok", "moe_intermediate_size", "decoder_sparse_step",
     "mlp_only_layers", "sliding_window", "use_sliding_window"}
)  # fmt: skip

LLAMA = Family(architecture="LlamaForCausalLM", model_type="llama", gguf="llama", permuted=True)
FAMILIES = (
    LLAMA,
    Family(
        architecture="MistralForCausalLM",
        model_type="mistral",
        gguf=None,  # llama.cpp's converter calls it llama
        windows="every layer",
        reads=frozenset({"sliding_window"}),
    ),
    Family(
        architecture="Qwen2ForCausalLM",
        model_type="qwen2",
        gguf="qwen2",
        qkv_bias=True,
        windows="chosen layers",
        reads=_CHOSEN,
    ),
    Family(
        architecture="Qwen3ForCausalLM",
        model_type="qwen3",
        gguf="qwen3",
        qk_norm=True,
        windows="chosen layers",
        head_dim=128,
        reads=_CHOSEN,
    ),
    Family(
        architecture="Qwen3MoeForCausalLM",
        model_type="qwen3_moe",
        gguf="qwen3moe",
        qk_norm=True,
        windows="every layer",
        experts=True,
        reads=_EXPERTS,
    ),
)
BY_ARCHITECTURE = {family.architecture: family for family in FAMILIES}
BY_GGUF = {family.gguf: family for family in FAMILIES if family.gguf}

COMMON = frozenset(
    {"architectures", "model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
     "num_attention_heads", "num_key_value_heads", "head_dim", "max_position_embeddings", "rms_norm_eps", "rope_theta",
     "rope_parameters", "rope_scaling", "tie_word_embeddings", "bos_token_id", "eos_token_id"}
)  # fmt: skip

# Fields that would change the arithmetic, and the one value that is computed. Absent and null mean that value.
PINNED: dict[str, object] = {
    "hidden_act": "silu",
    "attention_bias": False,  # of Llama and Qwen3: biases on all four projections
    "mlp_bias": False,
    "quantization_config": None,
    "partial_rotary_factor": 1.0,
    "rope_interleaved": False,
    "pretraining_tp": 1,
    "norm_topk_prob": True,  # Qwen3-MoE: chosen experts' weights are renormalised
    "is_encoder_decoder": False,
    "add_cross_attention": False,
    "pruned_heads": {},
    "auto_map": None,  # code of the model's own
    "chunk_size_feed_forward": 0,
}
MUST_BE_THERE = {"Qwen3MoeForCausalLM": ("norm_topk_prob",)}  # transformers takes another value where it is absent

# Fields that change no logit: bookkeeping, training, and how text is generated (requests say that themselves).
HARMLESS = frozenset(
    {"_attn_implementation_autoset", "_name_or_path", "attention_dropout", "bad_words_ids", "begin_suppress_tokens",
     "cross_attention_hidden_size", "decoder_start_token_id", "diversity_penalty", "do_sample", "dtype",
     "early_stopping", "encoder_no_repeat_ngram_size", "exponential_decay_length_penalty", "finetuning_task",
     "forced_bos_token_id", "forced_eos_token_id", "id2label", "initializer_range", "is_decoder", "is_llama_config",
     "label2id", "length_penalty", "max_length", "min_length", "no_repeat_ngram_size", "num_beam_groups", "num_beams",
     "num_return_sequences", "output_attentions", "output_hidden_states", "output_router_logits", "output_scores",
     "pad_token_id", "prefix", "problem_type", "remove_invalid_values", "repetition_penalty", "return_dict",
     "return_dict_in_generate", "router_aux_loss_coef", "sep_token_id", "suppress_tokens", "task_specific_params",
     "temperature", "tie_encoder_decoder", "tokenizer_class", "top_k", "top_p", "torch_dtype", "torchscript",
     "transformers.js_config", "transformers_version", "typical_p", "unsloth_fixed", "unsloth_version",
     "use_bfloat16", "use_cache"}
)  # fmt: skip
