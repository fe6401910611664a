"""The written definition (docs/numerics.md) executed slowly and readably: every kernel and a whole forward pass.

It does not know the kernels, paging or threads. Rules: operations appear in the order the definition gives them; every
fused multiply-add is exact; float32 in, float32 out, and numpy is used for elementwise IEEE operations only (never
its sums, exponentials or matrix products).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from engines.bundled.arithmetic.order import Order, portable_order
from engines.bundled.arithmetic.rope import model_rope_table
from engines.bundled.config import Float32, Int32, Model, ModelConfig

Float64 = npt.NDArray[np.float64]

LANES = 16
VOCABULARY_CHUNK = 768

_EXP = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)
_LOG = (
    7.0376836292e-2,
    -1.1514610310e-1,
    1.1676998740e-1,
    -1.2420140846e-1,
    1.4249322787e-1,
    -1.6668057665e-1,
    2.0000714765e-1,
    -2.4999993993e-1,
    3.3333331174e-1,
)
f32 = np.float32


def fma(a: Float32 | np.float32, b: Float32 | np.float32, c: Float32 | np.float32) -> Float32:
    """a * b + c with one rounding, elementwise with broadcasting.

    The product of two float32 is exact in float64. The sum is rounded to odd there (Boldo and Melquiond, 2008), so
    that the last rounding, to float32, is the only one that counts, subnormal results included.
    """
    with np.errstate(all="ignore"):
        product = np.multiply(a, b, dtype=np.float64)
        addend = np.asarray(c, np.float64)
        total = np.asarray(product + addend)
        part = total - product
        error = (product - (total - part)) + (addend - part)
        even = (total.view(np.int64) & 1) == 0
        inexact = (error != 0.0) & np.isfinite(total) & np.isfinite(error)
        odd = np.nextafter(total, np.where(error > 0.0, np.inf, -np.inf))
        return np.asarray(np.where(inexact & even, odd, total).astype(np.float32))


def tree(chunks: Sequence[Float32]) -> Float32:
    """T: one chunk is itself; else T of the first p plus T of the rest, p the largest power of two below their count.

    Raises:
        ValueError: no chunks.
    """
    if not chunks:
        raise ValueError("tree: expected at least one chunk")
    if len(chunks) == 1:
        return chunks[0]
    p = 1 << ((len(chunks) - 1).bit_length() - 1)
    return tree(chunks[:p]) + tree(chunks[p:])


def chain(x: Float32, y: Float32) -> Float32:
    """Sum over the last axis of x * y as a chain of fma in index order from +0.0, broadcasting the other axes."""
    shape = np.broadcast_shapes(x.shape, y.shape)
    total = np.zeros(shape[:-1], np.float32)
    for k in range(shape[-1]):
        total = fma(x[..., k], y[..., k], total)
    return total


def fold_lanes(lanes: Float32) -> Float32:
    """Sum of 16 lanes (last axis) by halves: lane i += lane i + 8, then 4, 2, 1."""
    for half in (8, 4, 2, 1):
        lanes = lanes[..., :half] + lanes[..., half : 2 * half]
    return lanes[..., 0]


def lane_sum(x: Float32) -> Float32:
    """Sum over the last axis: lane = index mod 16, ascending inside a lane from +0.0, folded by halves."""
    lanes = np.zeros((*x.shape[:-1], LANES), np.float32)
    for start in range(0, x.shape[-1], LANES):
        part = x[..., start : start + LANES]
        lanes[..., : part.shape[-1]] += part
    return fold_lanes(lanes)


def linear(x: Float32, weight: Float32, width: int) -> Float32:
    """(T, N) from (T, K) and (N, K): chains inside chunks of `width` along K, added by T."""
    columns = x.shape[-1]
    chunks = [chain(x[:, None, k : k + width], weight[None, :, k : k + width]) for k in range(0, columns, width)]
    return tree(chunks)


def exp(x: Float32) -> Float32:
    """exp by the definition's polynomial; +0.0 below -87, exp(88) above 88."""
    with np.errstate(all="ignore"):
        c = np.where(x > f32(88.0), f32(88.0), x)
        c = np.where(c < f32(-87.0), f32(-87.0), c)
        n = fma(c, f32(1.44269504), f32(12582912.0))
        power = n.view(np.uint32) + np.uint32(127) << np.uint32(23)
        n = n - f32(12582912.0)
        r = fma(n, f32(-0.693359375), c)
        r = fma(n, f32(2.12194440e-4), r)
        p = np.full_like(r, f32(_EXP[0]))
        for coefficient in _EXP[1:]:
            p = fma(p, r, f32(coefficient))
        p = fma(p, r * r, r) + f32(1.0)
        return np.where(x < f32(-87.0), f32(0.0), p * power.view(np.float32))


def log(x: Float32) -> Float32:
    """Natural logarithm by the definition's polynomial, for every float32."""
    with np.errstate(all="ignore"):
        small = x < f32(2.0**-126)
        scaled = np.where(small, x * f32(2.0**24), x)
        bits = scaled.view(np.int32)
        e = (bits >> 23) - np.where(small, np.int32(150), np.int32(126))
        m = ((bits & np.int32(0x007FFFFF)) | np.int32(0x3F000000)).view(np.float32)
        low = m < f32(0.707106781186547524)
        power = np.where(low, e - 1, e).astype(np.float32)
        m = np.where(low, m + m, m) - f32(1.0)
        z = m * m
        p = np.full_like(m, f32(_LOG[0]))
        for coefficient in _LOG[1:]:
            p = fma(p, m, f32(coefficient))
        y = m * z * p
        y = fma(power, f32(-2.12194440e-4), y)
        y = fma(f32(-0.5), z, y)
        y = fma(power, f32(0.693359375), m + y)
        y = np.where(x == f32(np.inf), x, y)
        return np.where(x > f32(0.0), y, np.where(x == f32(0.0), f32(-np.inf), f32(np.nan)))


def rms_norm(x: Float32, gain: Float32, eps: float) -> Float32:
    """(x / sqrt(mean of squares + eps)) * gain over the last axis; the squares are fused into 16 lanes."""
    size = x.shape[-1]
    lanes = np.zeros((*x.shape[:-1], LANES), np.float32)
    for start in range(0, size, LANES):
        part = x[..., start : start + LANES]
        width = part.shape[-1]
        lanes[..., :width] = fma(part, part, lanes[..., :width])
    root = np.sqrt(fold_lanes(lanes) / f32(size) + f32(eps))
    scaled: Float32 = (x / root[..., None]) * gain
    return scaled


def swiglu(gate: Float32, up: Float32) -> Float32:
    """(gate / (1 + exp(-gate))) * up."""
    return (gate / (f32(1.0) + exp(-gate))) * up


def rotate(head: Float32, cosine: Float32, sine: Float32) -> Float32:
    """Rope on the last axis: pairs (i, i + d/2), two rounded products and one rounded add or subtract each."""
    half = head.shape[-1] // 2
    a, b = head[..., :half], head[..., half:]
    return np.concatenate([a * cosine - b * sine, b * cosine + a * sine], axis=-1)


def attention(q: Float32, keys: Float32, values: Float32, key_chunk: int, window: int = 0) -> Float32:
    """(G, d) from rotated q (G, d), keys (n, d) and values (n, d) of one KV head, for a token at position n - 1.

    It sees the newest `window` keys, or all n if that is 0. Chunks are cut by absolute position; those without a key
    that is seen are left out.
    """
    n, dim = keys.shape
    first = max(0, n - window) if window else 0
    scaled = q * f32(1.0 / np.sqrt(np.float64(dim)))
    scores = chain(scaled[:, None, :], keys[None, first:, :])
    weights = exp(scores - scores.max(axis=-1, keepdims=True))
    weights = np.concatenate([np.zeros((len(q), first), np.float32), weights], axis=-1)  # indexed by position
    starts = range(first // key_chunk * key_chunk, n, key_chunk)
    # Zeros before the window leave a lane at +0.0. A chain begins at the first key that is seen.
    sums = tree([lane_sum(weights[:, s : s + key_chunk]) for s in starts])
    seen = [slice(max(s, first), s + key_chunk) for s in starts]
    outputs = tree([combine(weights[:, s], values[s]) for s in seen])
    return outputs / sums[:, None]


def combine(weights: Float32, values: Float32) -> Float32:
    """(G, d): chains over keys in order, weights (G, n) times values (n, d)."""
    return chain(weights[:, None, :], values.T[None, :, :])


def log_softmax(logits: Float32) -> Float32:
    """(x - max) - log(sum), the sum in chunks of 768 ids, 16 lanes each, added by T."""
    shifted = logits - logits.max(axis=-1, keepdims=True)
    weights = exp(shifted)
    size = logits.shape[-1]
    chunks = [lane_sum(weights[:, s : s + VOCABULARY_CHUNK]) for s in range(0, size, VOCABULARY_CHUNK)]
    result: Float32 = shifted - log(tree(chunks))[:, None]
    return result


def ranking(logits: Float32) -> Int32:
    """Ids of one row in order: value descending, id ascending, -0.0 equal to 0.0."""
    return np.argsort(-(logits + f32(0.0)), kind="stable").astype(np.int32)


def chain_sum(x: Float32) -> Float32:
    """Running sums of one row in order, each rounded, from +0.0."""
    total, out = f32(0.0), np.empty_like(x)
    for i, value in enumerate(x):
        total = f32(total + value)
        out[i] = total
    return out


def draw(logits: Float32, temperature: float, top_k: int, top_p: float, min_p: float, u: float) -> int:
    """The id drawn from one row, step by step as section Sampling of the definition says."""
    ids = ranking(logits)
    weights = exp((logits[ids] - logits.max()) / f32(temperature))
    ids, weights = ids[weights > 0.0], weights[weights > 0.0]
    if top_k > 0:
        ids, weights = ids[:top_k], weights[:top_k]
    least = f32(min_p) * weights[0]
    if f32(top_p) < f32(1.0):
        cumulative = chain_sum(weights)
        kept = 1 + int(np.argmax(cumulative >= f32(top_p) * cumulative[-1]))
        ids, weights = ids[:kept], weights[:kept]
    ids, weights = ids[weights >= least], weights[weights >= least]
    cumulative = chain_sum(weights)
    above = cumulative > f32(u) * cumulative[-1]
    return int(ids[np.argmax(above)] if above.any() else ids[-1])


def forward(model: Model, tokens: Sequence[int], order: Order | None = None) -> Float32:
    """(T, vocab_size) logits of one sequence from its first token on, without any cache."""
    config = model.config
    order = order or portable_order(config)
    table = model_rope_table(config, len(tokens))
    hidden = model.weights["model.embed_tokens.weight"][np.asarray(tokens)]
    for i in range(config.num_hidden_layers):
        layer = layer_weights(model, i)
        normed = rms_norm(hidden, layer["input_layernorm.weight"], config.rms_norm_eps)
        hidden = hidden + _self_attention(layer, normed, table, config, order, config.window(i))
        normed = rms_norm(hidden, layer["post_attention_layernorm.weight"], config.rms_norm_eps)
        said = _experts(layer, normed, config, order) if config.has_experts(i) else _mlp(layer, normed, order)
        hidden = hidden + said
    head = "model.embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight"
    normed = rms_norm(hidden, model.weights["model.norm.weight"], config.rms_norm_eps)
    return linear(normed, model.weights[head], order.head)


def layer_weights(model: Model, index: int) -> dict[str, Float32]:
    """The weights of one layer under their names inside it."""
    prefix = f"model.layers.{index}."
    return {name.removeprefix(prefix): w for name, w in model.weights.items() if name.startswith(prefix)}


def _mlp(layer: dict[str, Float32], x: Float32, order: Order, prefix: str = "mlp") -> Float32:
    gate = linear(x, layer[f"{prefix}.gate_proj.weight"], order.gate_up)
    up = linear(x, layer[f"{prefix}.up_proj.weight"], order.gate_up)
    width = order.down if prefix == "mlp" else order.expert_down
    return linear(swiglu(gate, up), layer[f"{prefix}.down_proj.weight"], width)


def _experts(layer: dict[str, Float32], x: Float32, config: ModelConfig, order: Order) -> Float32:
    logits = linear(x, layer["mlp.gate.weight"], order.gate_up)
    ids, weights = route(logits, config.num_experts_per_tok)
    outputs = np.empty((*ids.shape, x.shape[1]), np.float32)
    for expert in range(config.num_experts):
        rows, slots = np.nonzero(ids == expert)
        outputs[rows, slots] = _mlp(layer, x[rows], order, f"mlp.experts.{expert}")
    return mix(outputs, weights)


def route(logits: Float32, k: int) -> tuple[Int32, Float32]:
    """The k experts of each row (T, E), ascending by id, and their weights (T, k).

    Softmax with its sum in 16 lanes; chosen by probability descending, id ascending; renormalised by a chain in
    ascending id.
    """
    weights = exp(logits - logits.max(axis=-1, keepdims=True))
    probabilities = weights / lane_sum(weights)[:, None]
    ids = np.sort([ranking(row)[:k] for row in probabilities], axis=-1).astype(np.int32).reshape(len(logits), k)
    chosen = np.take_along_axis(probabilities, ids, axis=-1)
    return ids, chosen / np.array([chain_sum(row)[-1] for row in chosen], np.float32).reshape(-1, 1)


def mix(outputs: Float32, weights: Float32) -> Float32:
    """(T, N): a chain of fma over the experts' outputs (T, k, N) in ascending id, from +0.0."""
    return chain(weights[:, None, :], outputs.transpose(0, 2, 1))


def _self_attention(
    layer: dict[str, Float32], x: Float32, table: Float32, config: ModelConfig, order: Order, window: int
) -> Float32:
    half = config.head_dim // 2
    cosine, sine = table[:, None, :half], table[:, None, half:]

    def project(name: str, heads: int) -> Float32:
        y = linear(x, layer[f"self_attn.{name}.weight"], order.qkv)
        if config.qkv_bias:
            y = y + layer[f"self_attn.{name}.bias"]
        return y.reshape(len(x), heads, config.head_dim)

    def turn(part: str, heads: int) -> Float32:
        y = project(f"{part}_proj", heads)
        if config.qk_norm:
            y = rms_norm(y, layer[f"self_attn.{part}_norm.weight"], config.rms_norm_eps)
        return rotate(y, cosine, sine)

    q, k = turn("q", config.num_attention_heads), turn("k", config.num_key_value_heads)
    v = project("v_proj", config.num_key_value_heads)
    group = config.num_attention_heads // config.num_key_value_heads
    out = np.empty_like(q)
    for t in range(len(x)):
        for h in range(config.num_key_value_heads):
            heads = slice(h * group, (h + 1) * group)
            out[t, heads] = attention(q[t, heads], k[: t + 1, h], v[: t + 1, h], order.key_chunk, window)
    return linear(out.reshape(len(x), -1), layer["self_attn.o_proj.weight"], order.attention_out)
