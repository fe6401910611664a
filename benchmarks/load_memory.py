"""How much memory loading a model takes: a synthetic model of a real shape, written in shards, loaded in a process.

    python benchmarks/load_memory.py [--shape NAME ...] [--dtype BF16|F16|F32|Q8_0] [--json]

Q8_0 is a GGUF file of a Llama shape, converted on its way; the other types are safetensors in shards.

It knows no timings. What is reported: bytes of the files, bytes of the weights as the kernels hold them, and the peak
of the process that loads them: resident memory as the kernel counts it (mapped files included, which the system can
take back), and private memory, sampled, which it cannot. Exit code 1 if private memory at its peak exceeds the weights
held by more than the stated allowance.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import struct
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np

from benchmarks.large_gguf import write_llama
from engines.bundled.config import EngineConfig, ModelConfig
from engines.bundled.models.config_file import config_json
from engines.bundled.models.tensors import tensor_shapes

SHAPES = {
    "1b": ModelConfig(  # Llama-3.2-1B
        vocab_size=128256, hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32,
        num_key_value_heads=8, head_dim=64, max_position_embeddings=131072, rms_norm_eps=1e-5, rope_theta=500000.0,
        tie_word_embeddings=True, bos_token_id=128000, eos_token_ids=(128001,),
    ),
    "qwen2-0.5b": ModelConfig(
        vocab_size=151936, hidden_size=896, intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14,
        num_key_value_heads=2, head_dim=64, max_position_embeddings=32768, rms_norm_eps=1e-6, rope_theta=1e6,
        tie_word_embeddings=True, bos_token_id=151643, eos_token_ids=(151643,), architecture="Qwen2ForCausalLM",
        qkv_bias=True,
    ),
    "qwen3-0.6b": ModelConfig(
        vocab_size=151936, hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16,
        num_key_value_heads=8, head_dim=128, max_position_embeddings=40960, rms_norm_eps=1e-6, rope_theta=1e6,
        tie_word_embeddings=True, bos_token_id=151643, eos_token_ids=(151645,), architecture="Qwen3ForCausalLM",
        qk_norm=True,
    ),
    "mistral-7b, 4 layers": ModelConfig(  # of 32, and the window of version 0.1
        vocab_size=32000, hidden_size=4096, intermediate_size=14336, num_hidden_layers=4, num_attention_heads=32,
        num_key_value_heads=8, head_dim=128, max_position_embeddings=32768, rms_norm_eps=1e-5, rope_theta=10000.0,
        tie_word_embeddings=False, bos_token_id=1, eos_token_ids=(2,), architecture="MistralForCausalLM",
        windows=(4096,) * 4,
    ),
    "qwen3-30b-a3b, 2 layers": ModelConfig(  # of 48, each of 128 experts
        vocab_size=151936, hidden_size=2048, intermediate_size=6144, num_hidden_layers=2, num_attention_heads=32,
        num_key_value_heads=4, head_dim=128, max_position_embeddings=40960, rms_norm_eps=1e-6, rope_theta=1e6,
        tie_word_embeddings=False, bos_token_id=151643, eos_token_ids=(151645,), architecture="Qwen3MoeForCausalLM",
        qk_norm=True, num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768,
    ),
    "small": ModelConfig(  # 50 million parameters: seconds, and large beside what Python itself takes
        vocab_size=16384, hidden_size=768, intermediate_size=2048, num_hidden_layers=6, num_attention_heads=12,
        num_key_value_heads=4, head_dim=64, max_position_embeddings=2048, rms_norm_eps=1e-5, rope_theta=10000.0,
        tie_word_embeddings=True, bos_token_id=1, eos_token_ids=(2,),
    ),
}  # fmt: skip
STORED = {"BF16": 2, "F16": 2, "F32": 4}
GGUF = "Q8_0"
SHARD = 1 << 28  # bytes; a file is closed once it is larger
PAGE = os.sysconf("SC_PAGE_SIZE")
EXTRA = 3  # matrices of the largest size that may be in memory beside the weights: as stored, converted, as codes


def write_model(folder: Path, config: ModelConfig, dtype: str, shard: int = SHARD) -> int:
    """Writes config.json, shards and their index; returns the bytes of all shards. It holds one tensor at a time."""
    names, groups, size = tensor_shapes(config), [[]], 0
    for name, shape in names.items():
        groups[-1].append(name)
        size += STORED[dtype] * math.prod(shape)
        if size > shard:
            groups, size = [*groups, []], 0
    groups = [group for group in groups if group]
    random, weight_map, total = np.random.default_rng(0), {}, 0
    for index, group in enumerate(groups):
        path = folder / f"model-{index + 1:05}-of-{len(groups):05}.safetensors"
        weight_map |= dict.fromkeys(group, path.name)
        _write_shard(path, {name: names[name] for name in group}, dtype, random)
        total += path.stat().st_size
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps(config_json(config)))
    return total


def _write_shard(path: Path, shapes: dict[str, tuple[int, ...]], dtype: str, random: np.random.Generator) -> None:
    header, offset = {}, 0
    for name, shape in shapes.items():
        end = offset + STORED[dtype] * math.prod(shape)
        header[name], offset = {"dtype": dtype, "shape": shape, "data_offsets": [offset, end]}, end
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for shape in shapes.values():
            tensor = random.standard_normal(shape, np.float32) * np.float32(shape[-1] ** -0.5)
            if dtype == "BF16":
                (tensor.view(np.uint32) >> 16).astype("<u2").tofile(file)
            else:
                tensor.astype({"F16": "<f2", "F32": "<f4"}[dtype]).tofile(file)


class Peak:
    """The largest private memory of this process, sampled every few milliseconds."""

    def __init__(self) -> None:
        self.bytes = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._stop.wait(0.002):
            self.look()

    def look(self) -> None:
        resident, shared = map(int, Path("/proc/self/statm").read_text().split()[1:3])
        self.bytes = max(self.bytes, (resident - shared) * PAGE)

    def close(self) -> int:
        self._stop.set()
        self._thread.join()
        self.look()
        return self.bytes


def load(folder: str) -> dict[str, int | str]:
    """Loads the model as the engine does and runs one token. This is what the measured process does."""
    from engines.bundled.arithmetic.portable import open_kernel_arithmetic
    from engines.bundled.batch import StepBatch
    from engines.bundled.models import tiny
    from engines.bundled.models.catalogue import open_source

    config = EngineConfig(
        arithmetic="portable", max_num_seqs=1, max_num_batched_tokens=16, page_size=16, num_pages=4, threads=2,
        isa="auto", compiler="auto", tuning=0,
    )  # fmt: skip
    open_kernel_arithmetic(tiny.TinySource().model(), config)  # code, compiled kernels and threads are no weights
    base = Peak().close()
    peak = Peak()
    model = open_source(folder).model()
    arithmetic = open_kernel_arithmetic(model, config)
    zero, table = np.zeros(1, np.int32), np.zeros((1, 1), np.int32)
    arithmetic.forward(StepBatch(token=zero, sequence=zero, position=zero, page_table=table, wanted=zero))
    matrices = sum(rank["weight_bytes"] for rank in arithmetic.counts())
    return {
        "weights_held": matrices,
        "private_before": base,
        "private_peak": peak.close(),
        "resident_peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "digest": model.digest,
    }


def measure(config: ModelConfig, dtype: str, shard: int = SHARD) -> dict[str, int | str]:
    """Writes the model into a temporary folder, loads it in a process of its own, and says what that took."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "model.gguf" if dtype == GGUF else Path(folder)
        size = write_llama(source, config) if dtype == GGUF else write_model(source, config, dtype, shard)
        environment = os.environ | {"SAMEBITS_CACHE": str(Path(folder) / "cache")}
        command = [sys.executable, __file__, "--load", str(source)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"the process that loads failed with status {done.returncode}:\n{done.stderr}")
        found = json.loads(done.stdout.splitlines()[-1])
    largest = 4 * max(math.prod(shape) for shape in tensor_shapes(config).values())
    rows = 4 * max(
        config.hidden_size * 2 * config.intermediate_size,
        config.hidden_size * (config.num_attention_heads + 2 * config.num_key_value_heads) * config.head_dim,
    )
    allowance = found["weights_held"] + EXTRA * max(largest, rows)
    return {"dtype": dtype, "file_bytes": size, **found, "allowed": allowance, "largest_matrix": max(largest, rows)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", choices=sorted({*STORED, GGUF}), default="BF16")
    parser.add_argument("--shape", choices=sorted(SHAPES), nargs="+", default=["1b"])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--load", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.load:
        print(json.dumps(load(options.load)))
        return 0
    too_much = False
    for shape in options.shape:
        begin = time.monotonic()
        result = {"shape": shape, **measure(SHAPES[shape], options.dtype), "seconds": f"{time.monotonic() - begin:.0f}"}
        too_much |= result["private_peak"] - result["private_before"] > result["allowed"]
        print(json.dumps(result) if options.json else as_text(result), flush=True)
    return int(too_much)


def as_text(result: dict[str, int | str]) -> str:
    return "\n".join(
        f"{name:16} {value / 2**20:10.1f} MiB" if isinstance(value, int) else f"{name:16} {value}"
        for name, value in result.items()
    )


if __name__ == "__main__":
    raise SystemExit(main())
