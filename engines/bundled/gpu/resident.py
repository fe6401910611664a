"""A decode step of few rows as one launch for all layers: its buffers, the table of layers, when it can run.

Rules: all its blocks wait for each other, so it is used only where the driver says that all of them run at the same
time; the same bits as the separate operators, which the self-check asserts on the model's own weights.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from engines.bundled.gpu.fused import (
    CHUNK_KEYS,
    NEAR_KEYS,
    SHARED_LIMIT,
    THREADS,
    FusedInputs,
    hidden_chunks,
    inner_chunks,
    padded_stream,
)
from engines.bundled.gpu.interface import Launch, Machine, Shape
from engines.bundled.gpu.steps import Step
from engines.bundled.gpu.weights import GpuWeights

MOST_ROWS = 4  # of 8 rows, two launches a layer are faster (benchmarks/gpu_portable.py)


@dataclass(frozen=True, slots=True, kw_only=True)
class ResidentBuffers:
    """Addresses. What carries an epoch starts as 0."""

    layers: int  # the table of `ResidentLayer` in kernels/resident.cu
    begin: int
    middle: int
    attended: int
    gated: int
    epoch: int


def new_buffers(machine: Machine, shape: Shape, weights: GpuWeights) -> ResidentBuffers:
    """Allocated and filled. Raises GpuMemoryError."""
    row = MOST_ROWS * 4 * shape.cluster * -(-_back_columns(shape) // 3)  # triples with their epochs
    sizes = {
        "begin": row,
        "middle": row,
        "attended": shape.kv_heads * row,
        "gated": inner_chunks(shape) * row,
        "epoch": 1,
    }
    addresses = {name: machine.allocate(words) for name, words in sizes.items()}
    for name, words in sizes.items():
        machine.upload(addresses[name], np.zeros(words, np.int32))
    rows = [
        (w.attention_norm, w.qkv, w.qkv_bias, w.attention_out, w.mlp_norm, w.gate_up, w.down, w.keys, w.values)
        for w in weights.layers
    ]
    table = np.array(rows, np.uint64).view(np.int32)
    layers = machine.allocate(table.size)
    machine.upload(layers, table)
    return ResidentBuffers(layers=layers, **addresses)


def fits(machine: Machine, shape: Shape, layers: int) -> bool:
    """True if a model of this shape has such a step on this machine: all blocks at the same time, one per chain."""
    if not shape.cluster or layers < 2:  # the step's number is raised when the first layer of all blocks is done
        return False
    chunks = hidden_chunks(shape)
    back = 32 * -(-_back_columns(shape) // 24)
    threads = max(8 * _head_groups(shape) * chunks, 16 * _half_groups(shape) * chunks, back)
    launch = probe(shape)
    idle = (shape.cluster - 1) * _back_columns(shape) >= shape.hidden  # a block nobody waits for could be overtaken
    if idle or threads > THREADS or launch.shared > SHARED_LIMIT:
        return False
    return machine.clusters_that_fit(launch) * shape.cluster >= launch.grid[0]


def reach_of(step: Step, shape: Shape) -> str:
    """Which kernel runs a fused step; "" where a block would have more than one chunk of keys.

    One token: each block attends to few keys by itself ("near") or to a chunk of keys ("far"). Else the number of rows
    of the kernel.
    """
    position = step.words[2 * step.tokens : 3 * step.tokens]
    if step.tokens > MOST_ROWS or int((position // CHUNK_KEYS + 1).sum()) > shape.cluster:
        return ""
    if step.tokens > 1:
        rows = next(r for r in (2, 4) if r >= step.tokens)
        return str(rows) if _shared_rows(shape, rows) <= SHARED_LIMIT else ""
    return "near" if position[0] < NEAR_KEYS else "far"


def launch(
    shape: Shape, weights: GpuWeights, buffers: ResidentBuffers, inputs: FusedInputs, step: Step, out: int
) -> Launch:
    """All layers of a step that has a `reach_of`, and the last norm of the wanted rows to `out`; 0: nothing wanted."""
    reach = reach_of(step, shape)
    return Launch(
        kernel=f"decode_resident_{reach}",
        grid=((shape.kv_heads + inner_chunks(shape)) * shape.cluster, 1, 1),
        block=THREADS,
        shared=_shared(shape) if step.tokens == 1 else _shared_rows(shape, int(reach)),
        cluster=shape.cluster,
        overlap=False,
        arguments={
            "layers": buffers.layers, "embedding": weights.embedding, "token": inputs.token,
            "cos_sin": inputs.cos_sin, "table": inputs.table, "sequence": inputs.sequence,
            "position": inputs.position, "begin": buffers.begin, "middle": buffers.middle,
            "attended": buffers.attended, "gated": buffers.gated, "gain": weights.norm, "row": inputs.wanted,
            "out": out, "epoch": buffers.epoch, "count": len(weights.layers), "pages": inputs.pitch,
            "M": step.tokens, "rows": step.wanted, "eps": inputs.eps, "scale": inputs.scale,
        },
    )  # fmt: skip


def probe(shape: Shape) -> Launch:
    """The launch's geometry, for asking how many of its clusters fit; it is never run."""
    return Launch(
        kernel="decode_resident_near", grid=((shape.kv_heads + inner_chunks(shape)) * shape.cluster, 1, 1),
        block=THREADS, shared=_shared(shape), cluster=shape.cluster, arguments={}, overlap=False,
    )  # fmt: skip


def _head_groups(shape: Shape) -> int:
    """Groups of eight columns of q, k and v of a block."""
    group = shape.heads // shape.kv_heads
    return -(-(group + 2) * shape.dim // 8 // shape.cluster)


def _back_columns(shape: Shape) -> int:
    """Outputs of the second product of a block."""
    return 8 * -(-(shape.hidden // 8) // shape.cluster)


def _half_groups(shape: Shape) -> int:
    """Groups of eight gate columns of a block."""
    return -(-shape.width // 8 // shape.cluster)


def _shared(shape: Shape) -> int:
    """Bytes of the larger of the two kinds of blocks, as kernels/resident.cu lays them out."""
    group, chunks, hidden = shape.heads // shape.kv_heads, hidden_chunks(shape), shape.hidden
    back = _back_columns(shape) * shape.width
    lanes = 16 * 4 * (-(-(hidden // 16) // 4) | 1)
    common = back + padded_stream(shape) + lanes + 8
    heads, halves = _head_groups(shape) * 8, _half_groups(shape) * 8
    small = (group + 2) * shape.dim + 8 * group + shape.dim + group + 2
    words = (group + 2) * shape.dim + shape.cluster * (2 * group - (-shape.width // shape.cluster)) + shape.width + 1
    attention = (
        heads * hidden + 2 * NEAR_KEYS * shape.dim + group * CHUNK_KEYS + 2 * words + heads * (chunks + 1) + small
    )  # fmt: skip
    mlp = 2 * halves * hidden + 2 * shape.width + 2 * halves * chunks
    return 4 * (common + max(attention, mlp))


def _shared_rows(shape: Shape, rows: int) -> int:
    """The same for up to `rows` rows, as kernels/resident_rows.cu lays them out."""
    group, chunks, hidden = shape.heads // shape.kv_heads, hidden_chunks(shape), shape.hidden
    heads, halves = _head_groups(shape) * 8, _half_groups(shape) * 8
    common = _back_columns(shape) * shape.width + rows * padded_stream(shape) + hidden + 16 + 8
    words = (group + 2) * shape.dim + shape.cluster * (2 * group - (-shape.width // shape.cluster)) + rows * shape.width
    small = (group + 2) * shape.dim + 8 * group + shape.dim + group + 2
    attention = (
        heads * hidden + NEAR_KEYS * shape.dim + group * CHUNK_KEYS + 2 * (words + 1)
        + heads * (rows * chunks + 1) + small
    )  # fmt: skip
    mlp = 2 * halves * hidden + 2 * rows * shape.width + 2 * rows * halves * chunks
    return 4 * (common + max(attention, mlp))
