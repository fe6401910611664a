"""How much of the card's memory goes to keys and values, and what is said when it does not suffice.

It allocates nothing. Rules: the fraction is stated and in the fingerprint; whatever is asked for beyond what is
there is one error with both numbers, never a smaller pool in silence.
"""

from __future__ import annotations

import math

from engines.bundled.config import ModelConfig
from engines.bundled.gpu.interface import GpuMemoryError
from engines.bundled.models.tensors import tensor_shapes

KV_FRACTION = 0.8  # of the memory that is free after the weights
WORKSPACE_BYTES = 1 << 30
MOST_PAGES = 1 << 20  # a pool larger than this serves no workload of this engine
EMULATED_BYTES = 1 << 32  # what a card that this host emulates pretends to have
_BYTES = {"float32": 4, "bfloat16": 2}  # of a weight, a key or a value


def page_bytes(model: ModelConfig, page_size: int, dtype: str = "float32") -> int:
    """Bytes of one KV page over all layers."""
    return 2 * model.num_hidden_layers * model.num_key_value_heads * model.head_dim * page_size * _BYTES[dtype]


def weight_bytes(model: ModelConfig, dtype: str = "float32") -> int:
    """Bytes that packed weights, a second copy of the largest, a staging buffer and the workspaces take, about."""
    sizes = [math.prod(shape) for shape in tensor_shapes(model).values()]
    return (sum(sizes) + 2 * max(sizes)) * _BYTES[dtype] + WORKSPACE_BYTES


def pages_in(
    free: int, model: ModelConfig, page_size: int, fraction: float = KV_FRACTION, dtype: str = "float32"
) -> int:
    """Pages that `fraction` of `free` bytes hold. Raises GpuMemoryError when that is not one full context."""
    context = -(-model.max_position_embeddings // page_size)
    pages = min(int(free * fraction) // page_bytes(model, page_size, dtype), MOST_PAGES)
    if pages < context:
        need = context * page_bytes(model, page_size, dtype)
        raise GpuMemoryError(
            f"KV cache: one context of {model.max_position_embeddings} tokens needs {_gib(need)}, but "
            f"{fraction:.0%} of the free {_gib(free)} is all it may take; free memory on the card or set num_pages"
        )
    return pages


def memory_left(free: int, model: ModelConfig, dtype: str) -> int:
    """Of `free` bytes, what weights and workspaces leave. Raises GpuMemoryError when they do not fit."""
    needed = weight_bytes(model, dtype)
    if needed > free:
        raise GpuMemoryError(
            f"weights and workspaces: about {_gib(needed)} are needed in {dtype} and {_gib(free)} are free; end what "
            "else uses the card, or take a smaller model"
        )
    return free - needed


def out_of_memory(wanted: int, free: int) -> GpuMemoryError:
    """The error of an allocation that does not fit."""
    return GpuMemoryError(
        f"the GPU is out of memory: {_gib(wanted)} more were asked for and {_gib(free)} are free; "
        "lower num_pages or max_num_batched_tokens, or end what else uses the card"
    )


def _gib(count: int) -> str:
    return f"{count / 2**30:.2f} GiB"
