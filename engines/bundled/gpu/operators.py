"""Launches of single operators: which kernel, which grid, how much shared memory. It holds no buffers.

Rules: tiles, splits and rows per block are chosen here for speed alone; the kernels give the same bits for every
choice. Launches that fill the card do not overlap with what follows: waiting blocks took their place (8.5 against
6.2 ms for a prefill of 512 on an H200). What no choice can compute is refused with the reason.
"""

from __future__ import annotations

from dataclasses import dataclass

from engines.bundled.errors import NotSupported
from engines.bundled.gpu.interface import Launch, Shape

COLUMNS = 128  # packed weights are padded to a multiple of this many outputs
FEW_THREADS = 512  # of a block of the kernels for few rows
FEW_ROWS = 16  # up to here the kernels for few rows are faster
MOST_SHARED = 200 * 1024
PARTIAL_FLOATS = 1 << 24  # workspace of split sums
_BLOCKS = 132 * 2  # what fills a large card: enough for a rule of thumb
_TILES = {  # rows, columns, threads, step along K, stages
    "any": (64, 64, 128, 16, 4),
    "32": (32, 64, 64, 32, 3),
    "64": (64, 64, 128, 32, 3),
    "64x128": (64, 128, 128, 32, 3),
    "128": (128, 128, 256, 16, 4),
}
VOCABULARY_CHUNK = 768  # ids whose exponentials are added in 16 lanes
QUERIES = 16  # pairs of (token, head) in an attention tile


@dataclass(frozen=True, slots=True, kw_only=True)
class Linear:
    """One linear layer's operands, as addresses, and its order of sums."""

    x: int
    weight: int
    out: int
    rows: int
    outputs: int
    inputs: int
    width: int
    bias: int = 0
    add: bool = False  # to what `out` holds


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """A choice of kernel for a linear layer; None leaves it to the rules here. It moves no bit."""

    kernel: str | None = None  # "few_rows_8", "many_rows_64", ...
    share: int = 0


def check_shape(shape: Shape, expert_inner: int = 0) -> None:
    """Raises NotSupported for a shape these kernels are not written for; `expert_inner` is an expert's inner width."""
    group = shape.heads // shape.kv_heads
    rules = (
        (shape.hidden % 16 == 0, f"hidden size {shape.hidden} is no multiple of 16"),
        (shape.inner % 16 == 0, f"intermediate size {shape.inner} is no multiple of 16"),
        (expert_inner % 16 == 0, f"an expert's inner width {expert_inner} is no multiple of 16"),
        (shape.dim % 16 == 0, f"head size {shape.dim} is no multiple of 16"),
        (shape.width % 16 == 0, f"chunk width {shape.width} is no multiple of 16"),
        (shape.heads % shape.kv_heads == 0, f"{shape.heads} heads do not divide into {shape.kv_heads} KV heads"),
        (group <= QUERIES, f"{group} heads share a KV head; {QUERIES} at most"),
    )
    wrong = [text for holds, text in rules if not holds]
    if wrong:
        raise NotSupported(f"the GPU kernels do not compute this model: {'; '.join(wrong)}; use device=cpu")


def padded(outputs: int) -> int:
    """Outputs of a packed weight."""
    return -(-outputs // COLUMNS) * COLUMNS


def pack(weight: int, out: int, outputs: int, inputs: int) -> Launch:
    """(N, K) into the packed layout."""
    names = {"weight": weight, "out": out, "N": outputs, "K": inputs, "padded": padded(outputs)}
    return Launch(kernel="pack", grid=(1024, 1, 1), block=256, shared=0, arguments=names)


def linear(op: Linear, partial: int, linked: bool, tuning: Tuning | None = None) -> Launch:
    """A linear layer. `partial` is a workspace of PARTIAL_FLOATS; `linked` allows blocks to share a tile's chunks.

    Raises:
        NotSupported: more chunks along K than the kernels can add.
    """
    tuning = tuning or Tuning()
    chunks = -(-op.inputs // op.width)
    if tuning.kernel is None:
        few = _few_rows(op, chunks) if op.rows <= FEW_ROWS else None
        return few or _many_rows(op, chunks, partial, *_choose_tile(op, chunks, linked))
    if tuning.kernel.startswith("few"):
        return _few_launch(op, chunks, int(tuning.kernel.split("_")[-1]), tuning.share)
    return _many_rows(op, chunks, partial, tuning.kernel.removeprefix("many_rows_"), tuning.share)


def _arguments(op: Linear, partial: int, share: int) -> dict[str, int | float]:
    return {
        "x": op.x, "weight": op.weight, "bias": op.bias, "out": op.out, "partial": partial,
        "M": op.rows, "N": op.outputs, "K": op.inputs, "width": op.width, "sum": int(op.add), "share": share,
    }  # fmt: skip


def _few_rows(op: Linear, chunks: int) -> Launch | None:
    """None where a block would need too many threads or too much shared memory."""
    most = 2 if op.outputs <= 2048 else 4 if op.outputs < 16384 else 8
    rows = next((r for r in (1, 2, 4) if r >= min(op.rows, most)), most)
    while rows > 1 and _few_shared(op, chunks, rows, 4) > MOST_SHARED // 2:
        rows //= 2
    share = 8 if rows < 8 else 4
    while share > 1 and 8 * share * chunks > FEW_THREADS:
        share //= 2
    if 8 * share * chunks > FEW_THREADS or _few_shared(op, chunks, rows, share) > MOST_SHARED:
        return None
    return _few_launch(op, chunks, rows, share)


def _few_shared(op: Linear, chunks: int, rows: int, share: int) -> int:
    return 4 * rows * chunks * (op.width + 4 + 8 * share)


def _few_launch(op: Linear, chunks: int, rows: int, share: int) -> Launch:
    return Launch(
        kernel=f"few_rows_{rows}",
        grid=(padded(op.outputs) // (8 * share), -(-op.rows // rows), 1),
        block=8 * share * chunks,
        shared=_few_shared(op, chunks, rows, share),
        arguments=_arguments(op, 0, share),
    )


def takes(kernel: str, width: int, inputs: int) -> bool:
    """True if a kernel for many rows can step through chunks of this width and through all inputs."""
    step = _TILES[kernel.removeprefix("many_rows_")][3]
    return width % step == 0 and inputs % step == 0


def _choose_tile(op: Linear, chunks: int, linked: bool) -> tuple[str, int]:
    """The tile by the number of rows, and chunks per block, split where blocks are few."""
    tile = "32" if op.rows <= 64 else "64"
    if not takes(tile, op.width, op.inputs):
        tile = "any"
    rows, columns, *_ = _TILES[tile]
    tiles = -(-op.rows // rows) * -(-op.outputs // columns)
    shares = [1 << i for i in range((chunks - 1).bit_length() + 1)]
    possible = [n for n in shares if n <= 32 and _may_split(-(-chunks // n), tiles * rows * columns, linked)]
    if not possible:
        raise NotSupported(f"{chunks} chunks along K are more than the GPU kernels add; use device=cpu")
    return tile, min(possible, key=lambda n: (_cost(tiles, chunks, n), -n))


def _may_split(parts: int, outputs: int, linked: bool) -> bool:
    return parts == 1 or (linked and parts <= 8 and parts * outputs <= PARTIAL_FLOATS)


def _cost(tiles: int, chunks: int, share: int) -> float:
    """Chunks one after the other, and what adding up parts costs; fitted to measurements on an H200."""
    parts = -(-chunks // share)
    return -(-tiles * parts // _BLOCKS) * min(share, chunks) + (1.8 if parts > 1 else 0.0)


def _many_rows(op: Linear, chunks: int, partial: int, tile: str, share: int) -> Launch:
    rows, columns, threads, step, stages = _TILES[tile]
    parts = -(-chunks // share)
    if share > 32 or parts > 8:
        raise NotSupported(f"{chunks} chunks along K are more than the GPU kernels add; use device=cpu")
    return Launch(
        kernel=f"many_rows_{tile}",
        grid=(-(-op.rows // rows), -(-op.outputs // columns), parts),
        block=threads,
        shared=4 * stages * (rows * (step + 4) + step * columns),
        arguments=_arguments(op, partial, share),
        cluster=parts,
        overlap=False,
    )


def embed(table: int, token: int, out: int, rows: int) -> Launch:
    """Rows of the embedding."""
    names = {"table": table, "token": token, "out": out}
    return Launch(kernel="embed", grid=(rows, 1, 1), block=128, shared=0, arguments=names)


def rms_norm(shape: Shape, x: int, gain: int, out: int, rows: int, eps: float, gathered: int | None = None) -> Launch:
    """RMSNorm of `rows` rows; `gathered` is the address of their indices in x."""
    return Launch(
        kernel="rms_norm",
        grid=(rows, 1, 1),
        block=128,
        shared=4 * (shape.hidden + 4),
        arguments={"x": x, "gain": gain, "row": gathered or 0, "out": out,
                   "gathered": int(gathered is not None), "eps": eps},
    )  # fmt: skip


def norm_heads(shape: Shape, qkv: int, q_gain: int, k_gain: int, rows: int, eps: float) -> Launch:
    """RMSNorm of each query and key head of `rows` rows, in place."""
    return Launch(
        kernel="norm_heads", grid=(rows, shape.heads + shape.kv_heads, 1), block=128, shared=4 * (shape.dim + 4),
        arguments={"qkv": qkv, "q_gain": q_gain, "k_gain": k_gain, "eps": eps},
    )  # fmt: skip


def swiglu(shape: Shape, gate_up: int, out: int, rows: int) -> Launch:
    """The gated activation."""
    blocks = min(-(-rows * shape.inner // 256), 4096)
    return Launch(
        kernel="swiglu_rows", grid=(blocks, 1, 1), block=256, shared=0,
        arguments={"gate_up": gate_up, "out": out, "M": rows},
    )  # fmt: skip


def log_softmax(logits: int, out: int, rows: int, vocab: int) -> Launch:
    """Log-probabilities of `rows` rows."""
    chunks = -(-vocab // VOCABULARY_CHUNK)
    arguments = {"logits": logits, "out": out, "n": vocab}
    return Launch(
        kernel="log_softmax", grid=(rows, 1, 1), block=512, shared=4 * (chunks + 18), arguments=arguments, overlap=False
    )


def exponential(x: int, out: int, count: int) -> Launch:
    """exp of `count` elements."""
    blocks = min(-(-count // 256), 4096)
    return Launch(
        kernel="exponential", grid=(blocks, 1, 1), block=256, shared=0,
        arguments={"x": x, "out": out, "n": count},
    )  # fmt: skip


def attend(
    shape: Shape, arguments: dict[str, int | float], chunks: int, tiles: int, tokens: int, size: int
) -> list[Launch]:
    """Attention of `tiles` tiles of up to `size` pairs (4 or QUERIES) over up to `chunks` chunks of keys."""
    grid = (chunks, shape.kv_heads, tiles)
    scores, weights = 4 * size * (shape.dim + 10), 4 * (256 * size + 128 * min(shape.dim, 64)) + 8 * 256 + 12 * size
    block = 256 if size == 4 else 128
    return [
        Launch(kernel=f"scores_{size}", grid=grid, block=block, shared=scores, arguments=arguments, overlap=False),
        Launch(kernel=f"weigh_{size}", grid=grid, block=block, shared=weights, arguments=arguments, overlap=False),
        Launch(kernel="combine_chunks", grid=(tokens, 1, 1), block=256, shared=0, arguments=arguments),
    ]
