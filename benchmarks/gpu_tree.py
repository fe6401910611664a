"""Products of `k_order=tree` on a GPU beside those of one chain: microseconds per call by cut, and one form of bits.

    python benchmarks/gpu_tree.py --out OUT [--sweep]

With the variables of `engines.bundled_adapter.SPLIT_K_OFF` set, as the engine has them: cuBLASLt is what the chain
uses. `--sweep` times every cut of a list, compiled by several processes first, and prints the fastest three for each
number of rows. Exit code: 1 if a cut gave other bits than the reference, else 0.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from gpu_matmul import operands, say, time_graph

from engines.bundled.gpu.tensorcore.linear import CublasLt
from engines.bundled.gpu.tensorcore.tiles import Tile
from engines.bundled.gpu.tensorcore.tree import ONE_CUT, Cut, all_cuts, choose_cut, chunk_width, tree_product

ROWS = (1, 16, 32, 64, 128, 256, 1024, 4096)
SHAPES = ((4096, 4096), (4096, 12288))  # attention output and down projection of the 8B shape
CHUNKS, PROCESSES = 8, 12
SMALL = tuple(
    Cut(Tile(rows, outputs, inputs, stages, 4), held)
    for rows in (16, 32, 64)
    for outputs, inputs, stages in ((32, 256, 3), (64, 128, 4), (64, 256, 3))
    for held in (1, 2, 4, 8)
    if rows * outputs * held < 1 << 14
)
LARGE = tuple(
    Cut(Tile(*tile), held)
    for tile, most in (
        ((64, 64, 128, 3, 8), 8), ((64, 64, 128, 3, 4), 4), ((64, 128, 64, 4, 8), 4), ((128, 64, 64, 4, 8), 8),
        ((128, 64, 128, 3, 8), 8), ((128, 128, 64, 3, 8), 2), ((128, 128, 64, 4, 8), 1), ((128, 128, 64, 4, 4), 1),
        ((128, 256, 64, 3, 8), 1),
    )
    for held in (1, 2, 4, 8)
    if held <= most
)  # fmt: skip


def candidates(rows: int) -> tuple[Cut, ...]:
    few = [cut for cut in SMALL if min(rows, 64) <= cut.tile.rows <= max(16, rows)]
    return tuple(dict.fromkeys([*all_cuts(), *(few if rows <= 128 else ()), *(LARGE if rows >= 64 else ())]))


def every_cut() -> tuple[Cut, ...]:
    return tuple(dict.fromkeys(cut for rows in ROWS for cut in candidates(rows)))


def compile_part(part: int, parts: int) -> None:
    """Compiles every `parts`th cut into Triton's cache."""
    outputs, columns = SHAPES[0]
    x, weight = (torch.zeros((count, columns), device="cuda", dtype=torch.bfloat16) for count in (128, outputs))
    for cut in every_cut()[part::parts]:
        tree_product(x, weight, chunk_width(columns, CHUNKS), cut, torch.bfloat16)
    torch.cuda.synchronize()


def compile_all() -> None:
    """The same by several processes at a time."""
    command = [sys.executable, __file__, "--parts", str(PROCESSES), "--part"]
    started = [subprocess.Popen([*command, str(part)]) for part in range(PROCESSES)]
    codes = [process.wait() for process in started]
    say("compiled", len(every_cut()), "cuts; exit codes", codes)


def suggest(times: dict[tuple[int, int], dict[Cut, float]]) -> list[str]:
    """Lines for `tree.CUTS`: of each number of rows the cut whose times over all shapes have the least product."""
    lines = []
    for rows in ROWS[1:]:
        taken = [row for (count, _), row in times.items() if count == rows or (rows == ROWS[1] and count == ROWS[0])]
        cuts = set.intersection(*(set(row) for row in taken))
        best = min(cuts, key=lambda cut: math.prod(row[cut] for row in taken))
        most = "1 << 30" if rows == ROWS[-1] else str(rows)
        lines.append(f"({most}, Cut(Tile{tuple(best.tile)}, {best.held})),")
    return lines


def measure(sweep: bool) -> tuple[dict[str, object], int]:
    found: dict[str, object] = {}
    measured: dict[tuple[int, int], dict[Cut, float]] = {}
    wrong = 0
    made = {columns: operands(outputs, columns) for outputs, columns in SHAPES}
    if sweep:
        compile_all()
    for columns, (x, weights) in made.items():
        width, lt = chunk_width(columns, CHUNKS), CublasLt()
        lt.trust(weights[0], max(ROWS))
        reference = tree_product(x, weights[0], width, ONE_CUT, torch.bfloat16).view(torch.int16)
        chain = lt(x, weights[0]).view(torch.int16)
        found[f"{columns} of K, elements other than the chain's"] = int((reference != chain).sum())
        for rows in ROWS:
            a, times = x[:rows], dict[Cut, float]()
            for cut in candidates(rows) if sweep else dict.fromkeys([choose_cut(rows), ONE_CUT]):
                bits = tree_product(a, weights[0], width, cut, torch.bfloat16).view(torch.int16)
                if (bits != reference[:rows]).any():
                    wrong += 1
                    say("OTHER BITS", rows, columns, cut)
                times[cut] = time_graph(
                    [lambda w=w, c=cut: tree_product(a, w, width, c, torch.bfloat16) for w in weights]
                )
            row: dict[str, object] = {
                "chain us": round(time_graph([lambda w=w: lt(a, w) for w in weights]), 1),
                "tree us": round(times[choose_cut(rows)], 1),
            }
            for i, cut in enumerate(sorted(times, key=lambda cut: times[cut])[:3]):
                row[f"best {i + 1}"] = f"{times[cut]:.1f} {tuple(cut.tile)} held {cut.held}"
            found[f"{rows} x {columns}"], measured[rows, columns] = row, times
            say(rows, columns, row)
    if sweep:
        found["table"] = suggest(measured)
        say("table for tree.CUTS:", *found["table"])
    return found, wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("gpu_tree.json"))
    parser.add_argument("--part", type=int, help="compile this one of --parts and end")
    parser.add_argument("--parts", type=int, default=PROCESSES)
    options = parser.parse_args()
    if options.part is not None:
        compile_part(options.part, options.parts)
        return 0
    with torch.inference_mode():
        found, wrong = measure(options.sweep)
    options.out.write_text(json.dumps({**found, "cuts with other bits": wrong}, indent=1))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
