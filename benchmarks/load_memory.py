"""How much memory loading a model takes: a synthetic model of a real shape, written in shards, loaded in a process.

    python benchmarks/load_memory.py [--dtype BF16|F16|F32] [--shape 1b|tiny] [--json]

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
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np

from engines.bundled.config import EngineConfig, ModelConfig
from engines.bundled.models.config_file import config_json
from engines.bundled.models.tensors import tensor_shapes

SHAPES = {
    "1b": ModelConfig(  # Llama-3.2-1B
        vocab_size=128256, hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32,
        num_key_value_heads=8, head_dim=64, max_position_embeddings=131072, rms_norm_eps=1e-5, rope_theta=500000.0,
        tie_word_embeddings=True, bos_token_id=128000, eos_token_ids=(128001,),
    ),
    "small": ModelConfig(  # 50 million parameters: seconds, and large beside what Python itself takes
        vocab_size=16384, hidden_size=768, intermediate_size=2048, num_hidden_layers=6, num_attention_heads=12,
        num_key_value_heads=4, head_dim=64, max_position_embeddings=2048, rms_norm_eps=1e-5, rope_theta=10000.0,
        tie_word_embeddings=True, bos_token_id=1, eos_token_ids=(2,),
    ),
}  # fmt: skip
STORED = {"BF16": 2, "F16": 2, "F32": 4}
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
        size = write_model(Path(folder), config, dtype, shard)
        environment = os.environ | {"SAMEBITS_CACHE": str(Path(folder) / "cache")}
        command = [sys.executable, __file__, "--load", folder]
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
    parser.add_argument("--dtype", choices=sorted(STORED), default="BF16")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="1b")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--load", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.load:
        print(json.dumps(load(options.load)))
        return 0
    result = measure(SHAPES[options.shape], options.dtype)
    if options.json:
        print(json.dumps(result))
    else:
        for name, value in result.items():
            print(f"{name:16} {value / 2**20:10.1f} MiB" if isinstance(value, int) else f"{name:16} {value}")
    return int(result["private_peak"] - result["private_before"] > result["allowed"])


if __name__ == "__main__":
    raise SystemExit(main())
