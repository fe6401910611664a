"""Speed of deterministic inference: `portable` against plain eager torch in float32 and against `free`.

Run as `python benchmarks/decode.py [--model smollm2] [--threads 2] [--rounds 9] [--json FILE]`. All arms hold the same
weights and the same keys and values, run interleaved in one process, and must give nearly the same logits before a
number is printed. A figure is the median over rounds of (time of the other arm / time of `portable`), with the quarter
points of those ratios beside it; above 1, `portable` is faster. Torch keeps a dense cache, which is its best case.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch: spinning threads disturb the other arm
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional

from engines.bundled.arithmetic.portable import KernelArithmetic, open_kernel_arithmetic
from engines.bundled.arithmetic.rope import rope_table
from engines.bundled.arithmetic.weights import GATE_UP, QKV, join
from engines.bundled.batch import StepBatch
from engines.bundled.config import EngineConfig, Float32, Model, ModelConfig
from engines.bundled.models.tensors import tensor_shapes

SMOLLM2 = ModelConfig(
    vocab_size=49152,
    hidden_size=576,
    intermediate_size=1536,
    num_hidden_layers=30,
    num_attention_heads=9,
    num_key_value_heads=3,
    head_dim=64,
    max_position_embeddings=8192,
    rms_norm_eps=1e-5,
    rope_theta=10000.0,
    tie_word_embeddings=True,
    bos_token_id=1,
    eos_token_ids=(2,),
)
PAGE = 16
NEAR = 1e-3  # relative to the largest logit: arms that compute the same thing differ by less


@dataclass(frozen=True)
class Case:
    """One measured step: `rows` sequences, `count` new tokens each, after `context` cached ones."""

    name: str
    rows: int
    count: int
    context: int


CASES = (
    Case("decode, batch 1, context 64", 1, 1, 64),
    Case("decode, batch 1, context 512", 1, 1, 512),
    Case("decode, batch 16, context 64", 16, 1, 64),
    Case("decode, batch 16, context 512", 16, 1, 512),
    Case("prefill of 512", 1, 512, 0),
)
LONGEST = 528  # tokens of cache per sequence, a multiple of PAGE


@dataclass(frozen=True)
class Ratio:
    """Median and quarter points of the ratios of one arm's time to `portable`'s, over the rounds."""

    median: float
    low: float
    high: float


class Eager:
    """Plain torch: F.linear, F.rms_norm and scaled_dot_product_attention over a dense cache."""

    def __init__(self, model: Model, keys: list[Float32], values: list[Float32]) -> None:
        c, w, tensor = model.config, model.weights, torch.tensor
        self.config = c
        self.embedding = tensor(w["model.embed_tokens.weight"])
        self.head = self.embedding if c.tie_word_embeddings else tensor(w["lm_head.weight"])
        self.norm = tensor(w["model.norm.weight"])
        self.layers = [
            {
                "norm1": tensor(w[f"model.layers.{i}.input_layernorm.weight"]),
                "qkv": tensor(join(w, i, QKV)),
                "out": tensor(w[f"model.layers.{i}.self_attn.o_proj.weight"]),
                "norm2": tensor(w[f"model.layers.{i}.post_attention_layernorm.weight"]),
                "gate_up": tensor(join(w, i, GATE_UP)),
                "down": tensor(w[f"model.layers.{i}.mlp.down_proj.weight"]),
                "keys": tensor(keys[i]),
                "values": tensor(values[i]),
            }
            for i in range(c.num_hidden_layers)
        ]
        table = torch.tensor(rope_table(LONGEST, c.head_dim, c.rope_theta))
        self.cosine, self.sine = (torch.cat([half, half], -1) for half in table.chunk(2, -1))

    def step(self, token: torch.Tensor, start: int) -> torch.Tensor:
        """Logits (rows, vocab) of the last of token (rows, count) at positions start, start + 1, ..."""
        c, (rows, count) = self.config, token.shape
        stop, heads = start + count, [c.num_attention_heads, c.num_key_value_heads, c.num_key_value_heads]
        x = self.embedding[token]
        for layer in self.layers:
            qkv = functional.linear(self.normed(x, layer["norm1"]), layer["qkv"]).view(rows, count, -1, c.head_dim)
            q, k, v = torch.split(qkv.transpose(1, 2), heads, 1)
            layer["keys"][:rows, :, start:stop] = self.rotated(k, start, stop)
            layer["values"][:rows, :, start:stop] = v
            attended = functional.scaled_dot_product_attention(
                self.rotated(q, start, stop),
                layer["keys"][:rows, :, :stop],
                layer["values"][:rows, :, :stop],
                is_causal=count > 1,
                enable_gqa=True,
            )
            x = x + functional.linear(attended.transpose(1, 2).reshape(rows, count, -1), layer["out"])
            gate, up = functional.linear(self.normed(x, layer["norm2"]), layer["gate_up"]).chunk(2, -1)
            x = x + functional.linear(functional.silu(gate) * up, layer["down"])
        return functional.linear(self.normed(x[:, -1], self.norm), self.head)

    def normed(self, x: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(x, (self.config.hidden_size,), gain, self.config.rms_norm_eps)

    def rotated(self, x: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        half = self.config.head_dim // 2
        turned = torch.cat([-x[..., half:], x[..., :half]], -1)
        return x * self.cosine[start:stop] + turned * self.sine[start:stop]


def random_model(four_bit: bool) -> Model:
    """Random weights of SmolLM2-135M's shape; `four_bit` rounds the matrices to 4-bit blocks of 32, as a GGUF has."""
    random, weights = np.random.default_rng(0), {}
    for name, shape in sorted(tensor_shapes(SMOLLM2).items()):
        scale = 0.04 if "embed" in name else 0.3 * shape[-1] ** -0.5
        weight = random.standard_normal(shape, np.float32) * np.float32(scale)
        if "norm" in name:
            weight = np.ones(shape, np.float32)
        weights[name] = to_blocks(weight) if four_bit and weight.ndim == 2 else weight
    return Model(name="random-4bit" if four_bit else "random", config=SMOLLM2, weights=weights, digest="")


def to_blocks(weight: Float32) -> Float32:
    """The nearest weights of the form d * q + m, q of 0 to 15, d and m half precision for each 32 along a row."""
    blocks = weight.reshape(len(weight), -1, 32)
    low = blocks.min(-1, keepdims=True)
    scale = ((blocks.max(-1, keepdims=True) - low) / np.float32(15)).astype(np.float16).astype(np.float32)
    q = np.clip(np.rint((blocks - low) / scale), 0, 15)
    q[..., 0], q[..., 1] = 0, 15
    rounded: Float32 = scale * q + low.astype(np.float16).astype(np.float32)
    return rounded.reshape(weight.shape)


def load_model(name: str) -> Model:
    if name in ("random", "random-4bit"):
        return random_model(name == "random-4bit")
    from engines.bundled.models.catalogue import open_source

    return open_source(name).model()


def open_arm(model: Model, arithmetic: str, threads: int) -> KernelArithmetic:
    config = EngineConfig(
        arithmetic=arithmetic,
        max_num_seqs=16,
        max_num_batched_tokens=512,
        page_size=PAGE,
        num_pages=16 * LONGEST // PAGE,
        threads=threads,
        isa="auto",
        compiler="auto",
        tuning=0,
    )
    return open_kernel_arithmetic(model, config)


def fill_pages(arm: KernelArithmetic, keys: list[Float32], values: list[Float32]) -> None:
    """Dense keys and values (16, kv_heads, LONGEST, head_dim) of each layer, into the pages in order."""
    for pages, k, v in zip(arm.pages, keys, values, strict=True):
        rows, heads, _, dim = k.shape
        paged = [
            a.reshape(rows, heads, -1, PAGE, dim).transpose(0, 2, 1, 3, 4).reshape(-1, heads, PAGE, dim) for a in (k, v)
        ]
        pages.keys[...] = paged[0].transpose(0, 1, 3, 2)
        pages.values[...] = paged[1]


def step_eager(eager: Eager, ids: torch.Tensor, start: int) -> Float32:
    with torch.inference_mode():
        logits: Float32 = eager.step(ids, start).numpy()
    return logits


def make_batch(case: Case, token: npt.NDArray[np.int64]) -> StepBatch:
    sequence = np.repeat(np.arange(case.rows, dtype=np.int32), case.count)
    return StepBatch(
        token=token.reshape(-1).astype(np.int32),
        sequence=sequence,
        position=np.tile(np.arange(case.context, case.context + case.count, dtype=np.int32), case.rows),
        page_table=np.arange(16 * LONGEST // PAGE, dtype=np.int32).reshape(16, -1),
        wanted=np.arange(case.count - 1, case.rows * case.count, case.count, dtype=np.int32),
    )


def measure(arms: Mapping[str, Callable[[], Float32]], rounds: int) -> dict[str, list[float]]:
    """Seconds of every arm in every round, arms interleaved; the first round warms up and is dropped."""
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    for i in range(rounds + 1):
        logits = {}
        for name, step in arms.items():
            start = time.perf_counter()
            logits[name] = step()
            if i:
                seconds[name].append(time.perf_counter() - start)
        scale = float(np.abs(logits["portable"]).max())
        worst = max(float(np.abs(logits[name] - logits["portable"]).max()) for name in arms) / scale
        if not worst < NEAR:
            raise SystemExit(f"the arms do not compute the same thing: logits differ by {worst:.1e}, relative")
    return seconds


def ratio(other: list[float], ours: list[float]) -> Ratio:
    ratios = [a / b for a, b in zip(other, ours, strict=True)]
    low, median, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return Ratio(median, low, high)


def run(model: Model, threads: int, rounds: int) -> dict[str, object]:
    torch.set_num_threads(threads)
    random, c = np.random.default_rng(1), model.config
    shape = (16, c.num_key_value_heads, LONGEST, c.head_dim)
    keys, values = ([random.standard_normal(shape, np.float32) for _ in range(c.num_hidden_layers)] for _ in "kv")
    eager = Eager(model, keys, values)
    portable, free = (open_arm(model, name, threads) for name in ("portable", "free"))
    for arm in (portable, free):
        fill_pages(arm, keys, values)
    results = []
    for case in CASES:
        token = random.integers(0, c.vocab_size, (case.rows, case.count))
        batch, ids = make_batch(case, token), torch.from_numpy(token)
        arms = {
            "eager": partial(step_eager, eager, ids, case.context),
            "portable": partial(portable.forward, batch),
            "free": partial(free.forward, batch),
        }
        seconds = measure(arms, rounds)
        ratios = {name: ratio(seconds[name], seconds["portable"]) for name in ("eager", "free")}
        results.append((case, {n: statistics.median(s) for n, s in seconds.items()}, ratios))
        print_case(*results[-1])
    return {
        "schema": 1,
        "model": model.name,
        "threads": threads,
        "rounds": rounds,
        "machine": machine(),
        "arithmetic": portable.describe(),
        "cases": [
            {"case": asdict(case), "seconds": times, "ratios": {n: asdict(r) for n, r in ratios.items()}}
            for case, times, ratios in results
        ],
    }


def print_case(case: Case, seconds: dict[str, float], ratios: dict[str, Ratio]) -> None:
    tokens = case.rows * case.count
    parts = [f"{name} x{r.median:.2f} ({r.low:.2f}-{r.high:.2f})" for name, r in ratios.items()]
    print(
        f"{case.name:32} portable {tokens / seconds['portable']:7.0f} tokens/s   against {'   '.join(parts)}",
        flush=True,
    )


def machine() -> dict[str, str]:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    cpu = named[0] if named else platform.processor()
    return {
        "cpu": cpu,
        "cores": str(os.cpu_count()),
        "load": f"{os.getloadavg()[0]:.2f}",
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "numpy": np.__version__,
        "system": platform.platform(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="random", help="random, random-4bit, or a model's name or path")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path, help="also write the figures there")
    chosen = parser.parse_args()
    facts = machine()
    print(f"{facts['cpu']}, {chosen.threads} of {facts['cores']} cores, load {facts['load']}; torch {facts['torch']}")
    result = run(load_model(chosen.model), chosen.threads, chosen.rounds)
    how = result["arithmetic"]
    print(f"model {chosen.model}; kernels {how['isa']}, {how['compiler']}; weights: {how['weights']}")  # type: ignore[index]
    if chosen.json:
        chosen.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
