"""Writes a GGUF file of a Llama shape with seeded Q8_0 blocks, one tensor in memory at a time.

It measures nothing. Rules: blocks are made of bytes, so that a file of gigabytes takes seconds; the vocabulary is bytes
and names, which a tokenizer can be made of.
"""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
from tokenizers.pre_tokenizers import ByteLevel

from engines.bundled.config import ModelConfig
from engines.bundled.models.gguf_file import _gguf_name
from engines.bundled.models.tensors import tensor_shapes

BLOCK, BLOCK_BYTES = 32, 34  # a float16 scale and 32 codes
Q8_0 = gguf.GGMLQuantizationType.Q8_0


def write_llama(path: Path, config: ModelConfig) -> int:
    """Returns the bytes of the file."""
    writer = gguf.GGUFWriter(path, "llama")
    _write_metadata(writer, config)
    tensors = {_gguf_name(name)[0]: shape for name, shape in tensor_shapes(config).items()}
    for name, shape in tensors.items():
        if len(shape) == 1:
            writer.add_tensor_info(name, shape, np.dtype(np.float32), 4 * shape[0])
        else:
            size = shape[0] * shape[1] // BLOCK * BLOCK_BYTES
            stored = (shape[0], shape[1] // BLOCK * BLOCK_BYTES)
            writer.add_tensor_info(name, stored, np.dtype(np.uint8), size, raw_dtype=Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    random = np.random.default_rng(0)
    for shape in tensors.values():
        writer.write_tensor_data(np.ones(shape, np.float32) if len(shape) == 1 else _blocks(shape, random))
    writer.close()
    return path.stat().st_size


def _blocks(shape: tuple[int, ...], random: np.random.Generator) -> np.ndarray:
    count = shape[0] * shape[1] // BLOCK
    blocks = random.integers(0, 256, (count, BLOCK_BYTES), np.uint8)
    scale = np.float16(shape[1] ** -0.5 / 64)
    blocks[:, :2] = np.frombuffer(scale.tobytes(), np.uint8)
    return blocks.reshape(shape[0], -1)


def _write_metadata(writer: gguf.GGUFWriter, c: ModelConfig) -> None:
    writer.add_block_count(c.num_hidden_layers)
    writer.add_context_length(c.max_position_embeddings)
    writer.add_embedding_length(c.hidden_size)
    writer.add_feed_forward_length(c.intermediate_size)
    writer.add_head_count(c.num_attention_heads)
    writer.add_head_count_kv(c.num_key_value_heads)
    writer.add_rope_freq_base(c.rope_theta)
    writer.add_layer_norm_rms_eps(c.rms_norm_eps)
    letters = sorted(ByteLevel.alphabet())
    tokens = [*letters, "ab", *(f"<unused{i}>" for i in range(c.vocab_size - len(letters) - 1))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("llama-bpe")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * len(tokens))
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(c.bos_token_id)
    writer.add_eos_token_id(c.eos_token_ids[0])
