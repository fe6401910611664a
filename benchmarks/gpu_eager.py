"""Plain eager torch in float32 on the GPU: the same model shape over a dense cache, for the comparison of speed only.

It knows none of our kernels. Rules: TF32 off; the faster of two ways to share KV heads is the one reported.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch
from torch.nn import functional

from engines.bundled.config import Model


class Eager:
    """Weights on the GPU and a dense cache of `batch` sequences of `most` tokens."""

    def __init__(self, model: Model, batch: int, most: int) -> None:
        torch.backends.cuda.matmul.allow_tf32 = False
        c = self.config = model.config
        self.weights = {name: torch.from_numpy(w).cuda() for name, w in model.weights.items()}
        for i in range(c.num_hidden_layers):
            p = f"model.layers.{i}"
            self.weights[f"{p}.qkv"] = torch.cat([self.weights[f"{p}.self_attn.{n}_proj.weight"] for n in "qkv"])
            self.weights[f"{p}.gu"] = torch.cat([self.weights[f"{p}.mlp.{n}_proj.weight"] for n in ("gate", "up")])
        self.cache(batch, most)

    def cache(self, batch: int, most: int) -> None:
        """A new cache of random keys and values."""
        c = self.config
        shape = (c.num_hidden_layers, batch, c.num_key_value_heads, most, c.head_dim)
        self.keys, self.values = torch.randn(shape, device="cuda"), torch.randn(shape, device="cuda")
        frequency = c.rope_theta ** (-torch.arange(0, c.head_dim, 2, device="cuda") / c.head_dim)
        angle = torch.arange(most, device="cuda")[:, None] * frequency[None]
        self.cosine, self.sine = angle.cos().repeat(1, 2), angle.sin().repeat(1, 2)

    def rotate(self, x: torch.Tensor, start: int) -> torch.Tensor:
        """Rope of x (batch, heads, tokens, dim)."""
        n, half = x.shape[2], x.shape[3] // 2
        turned = torch.cat([-x[..., half:], x[..., :half]], -1)
        return x * self.cosine[start : start + n] + turned * self.sine[start : start + n]

    def step(self, token: torch.Tensor, start: int, repeat: bool) -> torch.Tensor:
        """Logits of the last of `token` (batch, n), which stand at `start`."""
        c, w = self.config, self.weights
        batch, n = token.shape
        heads, kv, dim = c.num_attention_heads, c.num_key_value_heads, c.head_dim
        x = w["model.embed_tokens.weight"][token]
        for i in range(c.num_hidden_layers):
            p = f"model.layers.{i}"
            normed = functional.rms_norm(x, (c.hidden_size,), w[f"{p}.input_layernorm.weight"], c.rms_norm_eps)
            qkv = functional.linear(normed, w[f"{p}.qkv"]).view(batch, n, heads + 2 * kv, dim).transpose(1, 2)
            q, k, v = qkv.split([heads, kv, kv], 1)
            self.keys[i, :, :, start : start + n] = self.rotate(k, start)
            self.values[i, :, :, start : start + n] = v
            k, v = self.keys[i, :, :, : start + n], self.values[i, :, :, : start + n]
            if repeat:
                k, v = k.repeat_interleave(heads // kv, 1), v.repeat_interleave(heads // kv, 1)
            a = functional.scaled_dot_product_attention(
                self.rotate(q, start), k, v, is_causal=n > 1, enable_gqa=not repeat
            )
            x = x + functional.linear(a.transpose(1, 2).reshape(batch, n, -1), w[f"{p}.self_attn.o_proj.weight"])
            normed = functional.rms_norm(x, (c.hidden_size,), w[f"{p}.post_attention_layernorm.weight"], c.rms_norm_eps)
            gate, up = functional.linear(normed, w[f"{p}.gu"]).chunk(2, -1)
            x = x + functional.linear(functional.silu(gate) * up, w[f"{p}.mlp.down_proj.weight"])
        normed = functional.rms_norm(x[:, -1], (c.hidden_size,), w["model.norm.weight"], c.rms_norm_eps)
        return functional.linear(normed, w["model.embed_tokens.weight"])


def time_graph(run: Callable[[], object], repetitions: int) -> float:
    """Median microseconds of a replayed CUDA graph of `run`."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return time_calls(graph.replay, repetitions)


def time_calls(run: Callable[[], object], repetitions: int) -> float:
    """Median microseconds of `run`, by events on the device."""
    for _ in range(3):
        run()
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repetitions)]
    for before, after in events:
        before.record()
        run()
        after.record()
    torch.cuda.synchronize()
    return statistics.median(1000.0 * a.elapsed_time(b) for a, b in events)


def step_times(model: Model, batch: int, tokens: int, start: int, repetitions: int) -> dict[str, float]:
    """Microseconds of one step in a CUDA graph and of one launched call by call, each the faster way."""
    eager = Eager(model, batch, start + tokens)
    ids = torch.arange(batch * tokens, device="cuda").view(batch, tokens) % model.config.vocab_size
    with torch.inference_mode():
        ways = {repeat: lambda repeat=repeat: eager.step(ids, start, repeat) for repeat in (False, True)}
        graph = min(time_graph(run, repetitions) for run in ways.values())
        plain = min(time_calls(run, max(3, repetitions // 4)) for run in ways.values())
    return {"eager graph": graph, "eager": plain}
