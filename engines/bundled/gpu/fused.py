"""Launches of a fused decode step: two per layer, and the last norm. It holds no buffers.

Rules: the same bits as the separate operators, which the self-check asserts on the model's own weights; shapes and
steps it cannot take go the other way, said by `shape_fits` and `step_fits`.
"""

from __future__ import annotations

from dataclasses import dataclass

from engines.bundled.config import ModelConfig
from engines.bundled.gpu.interface import Launch, Shape
from engines.bundled.gpu.steps import Step
from engines.bundled.gpu.weights import GpuLayer, GpuWeights

THREADS, CHUNK_KEYS, NEAR_KEYS, SLOTS, MOST_ROWS = 256, 256, 128, 12, 16
FASTER_ROWS = 8  # beyond, the separate operators are faster
SHARED_LIMIT = 227 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedBuffers:
    """Addresses, each for MOST_ROWS rows."""

    first: int  # residual stream
    second: int
    exchange: int
    attention_parts: int
    mlp_parts: int
    maxima: int
    sums: int
    outputs: int
    counts: int  # one word per launch, zero before the first step


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedInputs:
    """Addresses of the step's integers and of the table of cosines and sines, and the constants of the model."""

    token: int
    sequence: int
    position: int
    wanted: int
    table: int
    cos_sin: int
    pitch: int
    eps: float
    scale: float


def hidden_chunks(shape: Shape) -> int:
    """Chunks of K of the first product of a fused launch."""
    return -(-shape.hidden // shape.width)


def inner_chunks(shape: Shape) -> int:
    """Chunks of K of the down projection: clusters of the MLP launch."""
    return -(-shape.inner // shape.width)


def shape_fits(shape: Shape, cluster: int) -> bool:
    """True if a model of this shape has a fused decode step with clusters of that size."""
    group, unit = shape.heads // shape.kv_heads, -(-2 * shape.width // 8 * hidden_chunks(shape) // cluster)
    whole = shape.width == group * shape.dim and shape.width <= 256
    return (
        whole
        and shape.hidden % shape.width % 16 == 0
        and shape.dim <= 128
        and group <= 8
        and 8 * max(unit, _back_units(shape, cluster)) <= THREADS
        and max(_attention_shared(shape, cluster, rows) for rows in (1, 8)) <= SHARED_LIMIT
        and max(_mlp_shared(shape, cluster, rows) for rows in (1, 8)) <= SHARED_LIMIT
    )


def model_fits(config: ModelConfig) -> bool:
    """True if fused steps compute such a model: they norm no heads and know no experts."""
    return not config.qk_norm and not config.num_experts


def step_fits(step: Step, positions: list[int], shape: Shape, windows: tuple[int, ...] = ()) -> bool:
    """True if a step can run fused: few rows, each the newest of its own sequence, not too many chunks of keys.

    Every row has to see all its keys: none is past the smallest of the model's `windows`.
    """
    units = sum(position // CHUNK_KEYS + 1 for position in positions)
    seen = max(positions) < min((window for window in windows if window), default=max(positions) + 1)
    return step.single and step.tokens <= FASTER_ROWS and units <= shape.cluster * SLOTS and seen


def sizes(shape: Shape, layers: int) -> dict[str, int]:
    """Words of each buffer of `FusedBuffers`."""
    units = shape.cluster * SLOTS
    group, chunks, inner = shape.heads // shape.kv_heads, hidden_chunks(shape), inner_chunks(shape)
    front = max(shape.kv_heads * (group + 2) * shape.dim, inner * 2 * shape.width)
    return {
        "first": MOST_ROWS * shape.hidden,
        "second": MOST_ROWS * shape.hidden,
        "exchange": MOST_ROWS * chunks * front,
        "attention_parts": shape.kv_heads * MOST_ROWS * shape.hidden,
        "mlp_parts": inner * MOST_ROWS * shape.hidden,
        "maxima": shape.kv_heads * units * group,
        "sums": shape.kv_heads * units * group,
        "outputs": shape.kv_heads * units * shape.width,
        "counts": 2 * layers,
    }


def decode_launches(
    shape: Shape, weights: GpuWeights, buffers: FusedBuffers, inputs: FusedInputs, rows: int
) -> list[Launch]:
    """All layers of a step of `rows` tokens."""
    launches = []
    for i, layer in enumerate(weights.layers):
        counts = count_arguments(shape, buffers.counts, 2 * i, 2 * len(weights.layers))
        launches.append(_attention(shape, weights, layer, buffers, {**_common(buffers, inputs, rows), **counts}, rows))
        counts = count_arguments(shape, buffers.counts, 2 * i + 1, 2 * len(weights.layers))
        launches.append(_mlp(shape, weights, layer, buffers, {**_common(buffers, inputs, rows), **counts}, rows))
    return launches


def count_arguments(shape: Shape, counts: int, index: int, total: int) -> dict[str, int | float]:
    """Which counters launch `index` of a step raises, awaits and clears.

    A launch clears the counter of the one before its predecessor, which nobody awaits any more; the first launch of a
    step clears those of the last two.
    """
    first = index == 0
    clusters = inner_chunks(shape) if index % 2 == 0 else shape.kv_heads  # of the launch before
    return {
        "done": counts + 4 * index,
        "previous": 0 if first else counts + 4 * (index - 1),
        "stale": counts + 4 * (total - 2 if first else index - 2) if index != 1 else 0,
        "other": counts + 4 * (total - 1) if first else 0,
        "expected": 0 if first else clusters * shape.cluster,
    }


def finish(
    shape: Shape, weights: GpuWeights, buffers: FusedBuffers, inputs: FusedInputs, rows: int, wanted: int, out: int
) -> Launch:
    """The last norm of the wanted rows."""
    return Launch(
        kernel="decode_finish",
        grid=(wanted, 1, 1),
        block=128,
        shared=4 * (shape.hidden + 4),
        arguments={"base": buffers.first, "parts": buffers.mlp_parts, "gain": weights.norm, "row": inputs.wanted,
                   "out": out, "M": rows, "eps": inputs.eps},
    )  # fmt: skip


def _attention(
    shape: Shape, w: GpuWeights, layer: GpuLayer, b: FusedBuffers, common: dict[str, int | float], rows: int
) -> Launch:
    first = common["previous"] == 0
    kernel_rows = 1 if rows == 1 else 8
    return Launch(
        kernel=f"decode_attention_{kernel_rows}",
        grid=(shape.kv_heads * shape.cluster, 1, 1),
        block=THREADS,
        shared=_attention_shared(shape, shape.cluster, kernel_rows),
        cluster=shape.cluster,
        arguments={
            **common, "embedding": w.embedding,
            "base": 0 if first else b.first, "parts": 0 if first else b.mlp_parts, "stream": b.second,
            "gain": layer.attention_norm, "front": layer.qkv, "bias": layer.qkv_bias, "back": layer.attention_out,
            "result": b.attention_parts, "keys": layer.keys, "values": layer.values,
        },
    )  # fmt: skip


def _mlp(
    shape: Shape, w: GpuWeights, layer: GpuLayer, b: FusedBuffers, common: dict[str, int | float], rows: int
) -> Launch:
    kernel_rows = 1 if rows == 1 else 8
    return Launch(
        kernel=f"decode_mlp_{kernel_rows}",
        grid=(inner_chunks(shape) * shape.cluster, 1, 1),
        block=THREADS,
        shared=_mlp_shared(shape, shape.cluster, kernel_rows),
        cluster=shape.cluster,
        arguments={
            **common, "embedding": w.embedding,
            "base": b.second, "parts": b.attention_parts, "stream": b.first,
            "gain": layer.mlp_norm, "front": layer.gate_up, "bias": 0, "back": layer.down,
            "result": b.mlp_parts, "keys": layer.keys, "values": layer.values,
        },
    )  # fmt: skip


def _common(b: FusedBuffers, inputs: FusedInputs, rows: int) -> dict[str, int | float]:
    return {
        "exchange": b.exchange, "maxima": b.maxima, "sums": b.sums, "outputs": b.outputs,
        "token": inputs.token, "sequence": inputs.sequence, "position": inputs.position, "table": inputs.table,
        "cos_sin": inputs.cos_sin, "pages": inputs.pitch, "M": rows, "eps": inputs.eps, "scale": inputs.scale,
    }  # fmt: skip


def _back_units(shape: Shape, cluster: int) -> int:
    return -(-(shape.hidden // 8) // cluster)


def padded_stream(shape: Shape) -> int:
    """Floats of a row of x in shared memory."""
    return hidden_chunks(shape) * (shape.width + 4)


def _stream(shape: Shape, rows: int) -> int:
    """Floats of x in shared memory: one row, or sixteen."""
    return (1 if rows == 1 else 2 * rows) * padded_stream(shape)


def _attention_shared(shape: Shape, cluster: int, rows: int) -> int:
    """Bytes, as `attention_block` in kernels/decode.cu lays them out."""
    group, unit = shape.heads // shape.kv_heads, shape.width * 8
    front = -(-(group + 2) * shape.dim // 8 * hidden_chunks(shape) // cluster) * unit
    values, scores = NEAR_KEYS * shape.dim, group * CHUNK_KEYS
    area = max(front, SLOTS * scores + (0 if rows == 1 else values))
    small = shape.hidden + scores + (group + 3) * shape.dim + 8 * group + group + 1 + 16 + 8
    floats = area + _back_units(shape, cluster) * unit + (values if rows == 1 else 0) + _stream(shape, rows) + small
    return 4 * floats


def _mlp_shared(shape: Shape, cluster: int, rows: int) -> int:
    unit = shape.width * 8
    front = -(-2 * shape.width // 8 * hidden_chunks(shape) // cluster) * unit
    return 4 * (front + _back_units(shape, cluster) * unit + _stream(shape, rows) + shape.hidden + 16 + 8)


def probe(shape: Shape) -> Launch:
    """A launch of the MLP's geometry, for asking how many of its clusters fit; it is never run."""
    return Launch(
        kernel="decode_mlp_1", grid=(inner_chunks(shape) * shape.cluster, 1, 1), block=THREADS,
        shared=_mlp_shared(shape, shape.cluster, 1), cluster=shape.cluster, arguments={},
    )  # fmt: skip
