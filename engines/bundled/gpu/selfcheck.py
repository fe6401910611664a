"""Whether this machine's kernels give the CPU's bits, asked each time an arithmetic is opened.

It does not choose kernels. Rules: data includes subnormal numbers, which a flushing machine gets wrong; one differing
element is a failure that names the operator; fused decode must agree with the separate operators on the model's own
weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

import numpy as np

from engines.bundled.arithmetic.order import KEY_CHUNK
from engines.bundled.batch import StepBatch
from engines.bundled.config import Float32, ModelConfig
from engines.bundled.gpu import operators
from engines.bundled.gpu.cases import Kind, Operators, Pair, hashed
from engines.bundled.gpu.expert_cases import expert_pair
from engines.bundled.gpu.experts import FEW_PAIRS
from engines.bundled.gpu.fused import CHUNK_KEYS, NEAR_KEYS
from engines.bundled.gpu.interface import GpuError, Machine, Shape
from engines.bundled.gpu.operators import Tuning
from engines.bundled.gpu.portable import GpuArithmetic
from engines.bundled.kernels.interface import Kernels

KINDS: tuple[Kind, ...] = ("uniform", "wide", "subnormal")
KERNELS = (
    *(f"few_rows_{rows}" for rows in (1, 2, 4, 8)),
    *(f"many_rows_{tile}" for tile in ("any", "32", "64", "64x128", "128")),
)
FAR, PIECE = CHUNK_KEYS + 8, 64  # a position whose keys are two chunks, and how many tokens before it run at a time


def check_arithmetic(arithmetic: GpuArithmetic) -> None:
    """Raises GpuError naming the first operator whose bits differ from the CPU's."""
    where = arithmetic.machine, arithmetic.shape, arithmetic.kernels
    windows = window_pairs(*where) if any(arithmetic.model.windows) else ()
    for pair in chain(operator_pairs(*where), windows, expert_pairs(*where, arithmetic.model)):
        if pair.differing:
            raise GpuError(
                f"self-check: {pair.name} differs from the CPU's kernels in {pair.differing} of {pair.cpu.size} "
                "elements; this card, driver or compiler does not compute the written definition; use device=cpu"
            )
        if np.isnan(pair.cpu).any():
            raise GpuError(f"self-check: {pair.name} is NaN on the CPU; what bits a NaN has is not defined")
    check_fused(arithmetic)


def operator_pairs(machine: Machine, shape: Shape, kernels: Kernels) -> Iterator[Pair]:
    """Every kernel on small data: all tiles and splits of linear layers, norm, activation, exp, attention."""
    ops, width = Operators(machine, shape, kernels), shape.width
    for kind in KINDS:
        columns = 3 * width + (32 if width % 32 == 0 else 16)  # the last chunk is short
        x, weight = hashed((19, columns), 1, kind), hashed((72, columns), 2, kind)
        for kernel in KERNELS:
            if kernel.startswith("many") and not operators.takes(kernel, width, columns):
                continue
            for share in (1, 4):
                tuning = Tuning(kernel=kernel, share=share)
                yield ops.linear(f"linear {kernel} share {share} on {kind} data", x, weight, width, tuning, share == 4)
        gain = hashed((shape.hidden,), 3)
        yield ops.rms_norm(f"rms_norm on {kind} data", hashed((3, shape.hidden), 4, kind), gain, 1e-5)
        heads = hashed((3, (shape.heads + 2 * shape.kv_heads) * shape.dim), 10, kind)
        gains = hashed((shape.dim,), 11), hashed((shape.dim,), 12)
        yield ops.norm_heads(f"norm of heads on {kind} data", heads, gains, 1e-6)
        yield ops.swiglu(f"swiglu on {kind} data", hashed((2, 2 * shape.inner), 5, kind))
        yield ops.exponential(f"exp on {kind} data", hashed((1000,), 6, kind))
    for kind in KINDS:
        yield ops.log_softmax(f"log_softmax on {kind} data", hashed((3, 2500), 14, kind, 20.0))
    yield ops.exponential("exp of -120 to 120", hashed((4000,), 7, "uniform", 120.0))
    qkv = (shape.heads + 2 * shape.kv_heads) * shape.dim
    lengths = (KEY_CHUNK + 21, 37)
    yield ops.attention("attention", hashed((sum(lengths), qkv), 8, "uniform", 3.0), lengths, 1e4, KEY_CHUNK)
    yield ops.attention("attention on subnormal data", hashed((37, qkv), 9, "subnormal"), (37,), 1e4, KEY_CHUNK)


def window_pairs(machine: Machine, shape: Shape, kernels: Kernels) -> Iterator[Pair]:
    """Attention in windows of few keys and of more than a chunk."""
    ops, columns = Operators(machine, shape, kernels), (shape.heads + 2 * shape.kv_heads) * shape.dim
    for lengths, window in (((KEY_CHUNK + 21, 37), 20), ((2 * KEY_CHUNK + 9,), KEY_CHUNK + 5)):
        data = hashed((sum(lengths), columns), 13, "uniform", 3.0)
        yield ops.attention(f"attention in a window of {window}", data, lengths, 1e4, KEY_CHUNK, window)


def expert_pairs(machine: Machine, shape: Shape, kernels: Kernels, model: ModelConfig) -> Iterator[Pair]:
    """A layer of experts, for a model that has them: few pairs of token and expert, and many."""
    for kind in KINDS if model.num_experts else ():
        for rows in (3, FEW_PAIRS + 2):
            yield expert_pair(Operators(machine, shape, kernels), kernels, model, rows, kind)


def check_fused(arithmetic: GpuArithmetic) -> None:
    """Raises GpuError when a fused decode step differs from the same step by separate operators."""
    shape = arithmetic.shape
    if not arithmetic.use_fused:
        return
    ways = [(rows, 0) for rows in sorted({min(rows, arithmetic.pool_pages) for rows in (1, 2, 3, 5)})]
    far = min(FAR, arithmetic.model.max_position_embeddings - 1, arithmetic.pool_pages * shape.page - 1)
    if arithmetic.use_resident and far >= NEAR_KEYS:
        ways.append((1, far))  # with the others, each kernel of a fused step once
    for rows, position in ways:
        logits = [_decode(arithmetic, rows, position, use) for use in (False, True)]
        differing = np.count_nonzero(logits[0].view(np.int32) != logits[1].view(np.int32))
        if differing:
            raise GpuError(
                f"self-check: fused decode of {rows} rows from position {position} on with clusters of {shape.cluster} "
                f"differs from the separate operators in {differing} of {logits[0].size} logits"
            )


def _decode(arithmetic: GpuArithmetic, rows: int, position: int, use_fused: bool) -> Float32:
    """Logits of `rows` tokens on the first pages of the pool: at 0 to 2, or of one at `position` behind a prompt."""
    before, use_graphs = arithmetic.use_fused, arithmetic.use_graphs
    arithmetic.use_fused, arithmetic.use_graphs = use_fused, False
    try:
        if position:
            for begin in range(0, position, PIECE):
                arithmetic.forward(_piece(arithmetic, begin, min(begin + PIECE, position)))
            return arithmetic.forward(_piece(arithmetic, position, position + 1))
        for place in range(min(3, arithmetic.shape.page)):
            logits = arithmetic.forward(_step(rows, place))
    finally:
        arithmetic.use_fused, arithmetic.use_graphs = before, use_graphs
    return logits


def _piece(arithmetic: GpuArithmetic, begin: int, end: int) -> StepBatch:
    """Tokens `begin` to `end` of one prompt."""
    position = np.arange(begin, end, dtype=np.int32)
    return StepBatch(
        token=(position + 1) % np.int32(arithmetic.model.vocab_size),
        sequence=np.zeros_like(position),
        position=position,
        page_table=np.arange((end - 1) // arithmetic.shape.page + 1, dtype=np.int32)[None],
        wanted=np.array([end - begin - 1], np.int32),
    )


def _step(rows: int, position: int) -> StepBatch:
    return StepBatch(
        token=np.arange(1, rows + 1, dtype=np.int32) + position,
        sequence=np.arange(rows, dtype=np.int32),
        position=np.full(rows, position, np.int32),
        page_table=np.arange(rows, dtype=np.int32)[:, None],
        wanted=np.arange(rows, dtype=np.int32),
    )
