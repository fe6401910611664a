"""Which ways to multiply give one form for every number of rows, asked on the model's own weights at each start.

It does not run models. Rules: the reference is our kernel with one tile, whose expression does not depend on the rows;
a faster way is taken only if every element it gives, at every number of rows it will be asked for, has the reference's
bits; what was taken, and why nothing faster was, is in the fingerprint.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator

import torch

from engines.bundled.gpu.tensorcore.linear import CublasLt, Linear, Tiled, multiply, row_sizes
from engines.bundled.gpu.tensorcore.tiles import ONE
from engines.bundled.gpu.tensorcore.tree import TreeLinear
from engines.bundled.gpu.tensorcore.weights import Weights

Tensor = torch.Tensor
ENVIRONMENT = {  # what closes split-K off; read when torch is imported or makes its first handle
    "CUBLAS_WORKSPACE_CONFIG": ":16:8",
    "CUBLASLT_WORKSPACE_SIZE": "1",
    "TORCH_BLAS_PREFER_CUBLASLT": "1",
}
REFERENCE_ROWS = 2048  # at a time: its sums of every chunk lie in memory
Product = Callable[[Tensor, Tensor], Tensor]
Facts = dict[str, str | int | float | bool]


def choose_linear(weights: Weights, *, tokens: int, seats: int) -> tuple[Linear, Facts]:
    """The fastest way that passes for steps of up to `tokens` tokens and logits of up to `seats` rows; the facts."""
    tried: list[str] = []
    missing = [name for name, value in ENVIRONMENT.items() if os.environ.get(name) != value]
    if missing:
        tried.append(f"cuBLASLt not tried: {', '.join(missing)} not set for this process")
    candidates: list[Linear] = [*([] if missing else [CublasLt()]), Tiled(by_rows=True)]
    for linear in candidates:
        compared, wrong = compare(linear, matrices(weights, tokens, seats), one_tile)
        if wrong is None:
            return linear, {"gpu_linear": linear.name, "gpu_linear_test": "; ".join([*tried, f"equal in {compared}"])}
        tried.append(f"{linear.name} refused: {wrong}")
    one = Tiled(by_rows=False)
    return one, {"gpu_linear": one.name, "gpu_linear_test": "; ".join(tried)}


def choose_tree(chunks: int, weights: Weights, tokens: int) -> tuple[TreeLinear, Facts]:
    """The same of products over a K that ranks may share: the table's cuts, or one cut for every number of rows."""
    one, by_rows = TreeLinear(chunks, by_rows=False), TreeLinear(chunks, by_rows=True)

    def reference(x: Tensor, weight: Tensor) -> Tensor:
        return torch.cat([one(rows, weight) for rows in torch.split(x, REFERENCE_ROWS)])

    compared, wrong = compare(by_rows, shared_matrices(weights, tokens), reference)
    if wrong is None:
        return by_rows, {"gpu_tree": by_rows.name, "gpu_tree_test": f"equal in {compared}"}
    return one, {"gpu_tree": one.name, "gpu_tree_test": f"{by_rows.name} refused: {wrong}"}


def one_tile(x: Tensor, weight: Tensor) -> Tensor:
    """The reference: our kernel with one tile for every number of rows."""
    return multiply(x, weight, ONE)


def compare(linear: Linear, matrices: Iterable[tuple[Tensor, int]], reference: Product) -> tuple[str, str | None]:
    """What was compared, in words, and the first difference, over matrices and the most rows of each."""
    shapes, products, elements = 0, 0, 0
    for weight, most in matrices:
        sizes = row_sizes(most)
        x = sample(sizes[-1], weight.shape[1], weight.device, weight.dtype)
        expected = reference(x, weight)
        if isinstance(linear, CublasLt):
            linear.trust(weight, sizes[-1])
        for rows in sizes:
            found = linear(x[:rows], weight)
            differing = int((found.view(torch.int16) != expected[:rows].view(torch.int16)).sum())
            if differing:
                shape = "x".join(map(str, weight.shape))
                return "", f"{differing} of {found.numel()} elements differ at {rows} rows of {shape}"
            products, elements = products + 1, elements + found.numel()
        shapes += 1
    return f"{shapes} shapes, {products} products, {elements} elements", None


def matrices(weights: Weights, tokens: int, seats: int) -> Iterator[tuple[Tensor, int]]:
    """One matrix of each shape, and the most rows it is multiplied with."""
    seen: set[tuple[int, ...]] = set()
    for layer in weights.layers:
        router = None if layer.experts is None else layer.experts.router
        for weight in (layer.qkv, layer.attention_out, layer.gate_up, layer.down, router):
            if weight is not None and tuple(weight.shape) not in seen:
                seen.add(tuple(weight.shape))
                yield weight, tokens
    yield weights.head, seats


def shared_matrices(weights: Weights, tokens: int) -> list[tuple[Tensor, int]]:
    """The first layer's matrices whose K ranks may share, and the most rows."""
    layer = weights.layers[0]
    return [(weight, tokens) for weight in (layer.attention_out, layer.down) if weight is not None]


def sample(rows: int, columns: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Normal numbers of a fixed seed, with rows of large and of small spread: other orders of sums show."""
    generator = torch.Generator(device).manual_seed(0)
    x = torch.randn((rows, columns), generator=generator, device=device, dtype=torch.float32)
    spread = torch.exp2(torch.randint(-8, 9, (rows, 1), generator=generator, device=device).float())
    return (x * spread).to(dtype)
