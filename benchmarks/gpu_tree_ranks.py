"""`tensorcore` with k_order=tree over ranks on cards of their own, through NCCL: logits against those of one card.

    python benchmarks/gpu_tree_ranks.py --ranks 2 --out OUT [--shape 8b|smollm2]

Each rank is a process on its card. It computes some steps alone with the whole model, then with the other ranks, each
holding its part of every layer and of the KV pages, and compares every bit of the logits. Control: ranks that round
their sums to bfloat16 before they are added must differ. Exit code: 0 all equal and the control fired, else 1.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from gpu_arm import SHAPES, rank_steps, say

from engines.bundled.config import EngineConfig
from engines.bundled.gpu.tensorcore.exchange import RankExchange
from engines.bundled.gpu.tensorcore.parallel import Ranks, rounded, take_shard, tree_of
from engines.bundled.gpu.tensorcore.start import open_source
from engines.bundled.gpu.tensorcore.weights import checksum, random_normal
from engines.bundled.parallel.group import Group, find_store, open_store
from engines.bundled.parallel.layout import split
from engines.bundled_adapter import SPLIT_K_OFF

PAGES, DEADLINE = 64, 120.0


def run_rank(rank: int, ranks: int, port: int, shape: str) -> dict[str, object]:
    """What one rank found."""
    device, config = f"cuda:{rank}", SHAPES[shape]
    torch.cuda.set_device(rank)
    engine = EngineConfig(
        arithmetic="tensorcore", max_num_seqs=8, max_num_batched_tokens=512, page_size=16, num_pages=PAGES, threads=4,
        isa="auto", compiler="auto", tuning=0, dtype="bfloat16", k_order="tree", enforce_eager=True,
    )  # fmt: skip
    arithmetic = open_source(config, engine, random_normal(0, device), device)
    steps = rank_steps(arithmetic)
    expected = [arithmetic.logits(step).clone() for step in steps]
    chunks = split(tree_of(arithmetic).chunks, ranks)
    group = Group(find_store(port, ranks, DEADLINE), rank, ranks, "nccl", DEADLINE)
    exchange = RankExchange(group, chunks)
    found: dict[str, object] = {
        "rank": rank, "weights": checksum(arithmetic.weights), "logits": sum(map(torch.Tensor.numel, expected)),
        "facts": arithmetic.describe(),
    }  # fmt: skip
    for name, meet in (("differing", exchange), ("control differing", rounded(exchange))):
        shard = take_shard(arithmetic, tree_of(arithmetic).chunks, chunks[rank], PAGES)
        together, begin = Ranks(arithmetic, [shard], meet), time.monotonic()
        same = [
            together.logits(step).view(torch.int16) == one.view(torch.int16)
            for step, one in zip(steps, expected, strict=True)
        ]
        found[name] = sum(int((~one).sum()) for one in same)
        found |= {"bytes of split matrices": shard.bytes, f"{name}, s": round(time.monotonic() - begin, 2)}
    found["bytes given"] = exchange.bytes
    group.close()
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="8b")
    parser.add_argument("--rank", type=int, help="be this rank")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    if options.rank is not None:
        found = run_rank(options.rank, options.ranks, options.port, options.shape)
        options.out.write_text(json.dumps(found, default=str))
        return 0
    store = open_store(0, options.ranks, DEADLINE)
    with tempfile.TemporaryDirectory() as place:
        outs = [Path(place) / f"{rank}.json" for rank in range(options.ranks)]
        command = [sys.executable, __file__, "--ranks", str(options.ranks), "--shape", options.shape]
        started = [
            subprocess.Popen(
                [*command, "--rank", str(rank), "--port", str(store.port), "--out", str(out)],
                env={**os.environ, **SPLIT_K_OFF},
            )
            for rank, out in enumerate(outs)
        ]
        codes = [process.wait() for process in started]
        results = [json.loads(out.read_text()) if out.exists() else {} for out in outs]
    whole = not any(codes) and len({str(found["weights"]) for found in results}) == 1
    right = whole and all(not found["differing"] and found["control differing"] for found in results)
    for found in results:
        say({name: value for name, value in found.items() if name != "facts"})
    options.out.write_text(json.dumps({"ranks": options.ranks, "exit codes": codes, "found": results}, indent=1))
    say("exit codes of ranks", codes, "all equal and the control fired" if right else "NOT AS EXPECTED")
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
