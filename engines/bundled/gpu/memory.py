"""How much of the card's memory goes to keys and values, and what is said when it does not suffice.

It allocates nothing. Rules: the fraction is stated and in the fingerprint; whatever is asked for beyond what is
there is one error with both numbers, never a smaller pool in silence.
"""

from __future__ import annotations

from engines.bundled.config import Model, ModelConfig
from engines.bundled.gpu.interface import GpuMemoryError

KV_FRACTION = 0.8  # of the memory that is free after the weights
WORKSPACE_BYTES = 1 << 30
MOST_PAGES = 1 << 20  # a pool larger than this serves no workload of this engine


def page_bytes(model: ModelConfig, page_size: int) -> int:
    """Bytes of one KV page over all layers, float32."""
    return 2 * model.num_hidden_layers * model.num_key_value_heads * model.head_dim * page_size * 4


def weight_bytes(model: Model) -> int:
    """Bytes that packed weights, a second copy of the embedding and the workspaces take, about."""
    held = sum(array.nbytes for array in model.weights.values())
    return held + 2 * max(array.nbytes for array in model.weights.values()) + WORKSPACE_BYTES


def pages_in(free: int, model: ModelConfig, page_size: int, fraction: float = KV_FRACTION) -> int:
    """Pages that `fraction` of `free` bytes hold. Raises GpuMemoryError when that is not one full context."""
    context = -(-model.max_position_embeddings // page_size)
    pages = min(int(free * fraction) // page_bytes(model, page_size), MOST_PAGES)
    if pages < context:
        need = context * page_bytes(model, page_size)
        raise GpuMemoryError(
            f"KV cache: one context of {model.max_position_embeddings} tokens needs {_gib(need)}, but "
            f"{fraction:.0%} of the free {_gib(free)} is all it may take; free memory on the card or set num_pages"
        )
    return pages


def out_of_memory(wanted: int, free: int) -> GpuMemoryError:
    """The error of an allocation that does not fit."""
    return GpuMemoryError(
        f"the GPU is out of memory: {_gib(wanted)} more were asked for and {_gib(free)} are free; "
        "lower num_pages or max_num_batched_tokens, or end what else uses the card"
    )


def _gib(count: int) -> str:
    return f"{count / 2**30:.2f} GiB"
