"""One process of gpu_tensorcore.py: matrix products in bfloat16, microseconds per call, as JSON.

`--ways cublas` times torch's product in a plain process; `--ways tensorcore` times ours and checks that each way gives
one form over all numbers of rows. Attention has a benchmark of its own, gpu_attention.py.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from engines.bundled.gpu.tensorcore.linear import CublasLt, Tiled, multiply
from engines.bundled.gpu.tensorcore.tiles import ONE, Tile, all_tiles, choose_tile

ROWS = (1, 8, 64, 256, 1024, 4096)
SHAPES = ((4096, 4096), (12288, 4096), (4096, 12288))  # outputs, inputs
START = time.monotonic()


def say(*words: object) -> None:
    print(f"[{time.monotonic() - START:6.1f}]", *words, flush=True)


def time_graph(calls: Sequence[Callable[[], object]], repeats: int = 5) -> float:
    """Microseconds per call of a graph that holds every call; several, so that data does not stay in the cache."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph, times = torch.cuda.CUDAGraph(), max(1, -(-16 // len(calls)))
    with torch.cuda.graph(graph):
        for _ in range(times):
            for call in calls:
                call()
    graph.replay()
    found = []
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        found.append(1e3 * begin.elapsed_time(end) / (2 * times * len(calls)))
    return statistics.median(found)


def operands(outputs: int, inputs: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
    generator = torch.Generator("cuda").manual_seed(outputs + inputs)
    make = lambda *shape: torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16)  # noqa: E731
    count = 8 if outputs * inputs < 1 << 25 else 4
    return make(max(ROWS), inputs), [make(outputs, inputs) * 0.02 for _ in range(count)]


def measure_products(ways: str, sweep: bool) -> dict[str, object]:
    found: dict[str, object] = {}
    for outputs, inputs in SHAPES:
        x, weights = operands(outputs, inputs)
        for rows in ROWS:
            a, row = x[:rows], {}
            if ways == "cublas":
                row["cublas"] = time_graph([lambda w=w: torch.nn.functional.linear(a, w) for w in weights])
            else:
                lt, tiled = CublasLt(), Tiled(by_rows=True)
                lt.trust(weights[0], max(ROWS))
                row["cublaslt"] = time_graph([lambda w=w: lt(a, w) for w in weights])
                row["tiles"] = time_graph([lambda w=w: tiled(a, w) for w in weights])
                row["one tile"] = time_graph([lambda w=w: multiply(a, w, ONE) for w in weights])
                if sweep:
                    row |= best_tile(a, weights)
            key = f"{rows}x{outputs}x{inputs}"
            found[key] = row
            say(key, {name: round(v, 1) if isinstance(v, float) else v for name, v in row.items()})
        if ways == "tensorcore":
            found[f"forms {outputs}x{inputs}"] = forms = count_forms(x, weights[0])
            say("forms", outputs, inputs, forms)
    return found


def best_tile(a: torch.Tensor, weights: list[torch.Tensor]) -> dict[str, object]:
    """The fastest of the tiles that the tables hold, and some more."""
    more = (Tile(16, 64, 256, 3, 4), Tile(32, 64, 128, 4, 4), Tile(64, 64, 128, 4, 4), Tile(64, 256, 64, 4, 4),
            Tile(128, 256, 64, 3, 8), Tile(128, 128, 64, 4, 4), Tile(16, 128, 256, 2, 4))  # fmt: skip
    times = {}
    for tile in (*all_tiles(), *more):
        if len(a) >= 1024 and tile.rows * tile.outputs < 64 * 128:
            continue
        times[tuple(tile)] = time_graph([lambda w=w, t=tile: multiply(a, w, t) for w in weights], 3)
    best = min(times, key=lambda tile: times[tile])
    return {
        "best": times[best],
        "best tile": str(best),
        "chosen tile": str(tuple(choose_tile(len(a), len(weights[0])))),
    }


def count_forms(x: torch.Tensor, weight: torch.Tensor) -> dict[str, int]:
    """Rows (of 20 numbers of rows) whose bits are not those of one tile's, by way."""
    reference = multiply(x, weight, ONE).view(torch.int16)
    lt = CublasLt()
    lt.trust(weight, max(ROWS))
    ways = {
        "cublaslt": lt,
        "tiles": Tiled(by_rows=True),
        "torch.mm of any rows": lambda a, w: torch.mm(a, w.t()),
    }
    sizes = (1, 2, 3, 5, 8, 16, 17, 24, 25, 32, 33, 64, 65, 128, 129, 256, 300, 512, 1000, 1024, 4096)
    return {
        name: sum(int((way(x[:n], weight).view(torch.int16) != reference[:n]).any()) for n in sizes)
        for name, way in ways.items()
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ways", choices=("cublas", "tensorcore"), required=True)
    parser.add_argument("--sweep", action="store_true", help="time every tile, too")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    with torch.inference_mode():
        results = {"products us": measure_products(options.ways, options.sweep)}
    options.out.write_text(json.dumps(results, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
