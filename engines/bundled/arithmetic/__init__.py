"""The arithmetics of the bundled engine: `portable`, `free` and `native`, each a forward pass over paged KV.

It does not know requests, scheduling or sampling. Rules: an arithmetic owns its weights' layout and its KV pages;
`portable` gives the bits of `docs/numerics.md`; nothing here imports torch unless `native` or the fallback asks.
"""

from __future__ import annotations

from engines.bundled.batch import Arithmetic
from engines.bundled.config import EngineConfig, Model

NAMES = ("portable", "free", "native")


def open_arithmetic(model: Model, config: EngineConfig) -> Arithmetic:
    """Packs the weights and allocates `config.num_pages` x `config.page_size` tokens of KV pages for all layers.

    The caller keeps page numbers below `num_pages` and positions below `max_position_embeddings` and below
    `num_pages * page_size`. Sampling functions come from `engines.bundled.kernels.library.load` whatever the
    arithmetic.

    Raises:
        ValueError: an arithmetic that is none of NAMES, or a model whose weights do not fit its shape.
        KernelError: no kernels can be built or trusted here (`engines.bundled.kernels.interface`).
    """
    if config.arithmetic == "native":
        from engines.bundled.arithmetic.native import open_native

        return open_native(model, config)
    if config.arithmetic not in NAMES:
        raise ValueError(f"arithmetic: expected one of {', '.join(NAMES)}, got {config.arithmetic!r}")
    from engines.bundled.arithmetic.portable import open_kernel_arithmetic

    return open_kernel_arithmetic(model, config)
