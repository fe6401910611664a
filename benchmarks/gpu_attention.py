"""Attention of `tensorcore` on one GPU: every form of a sweep against scaled_dot_product_attention (flash), as JSON.

32 / 8 heads of 128, bfloat16, pages of 16 in random places; torch's has a dense cache. Forms that share keys and step
must give the same bits, alone and in tiles: what differs is counted. Kernels are compiled by several processes
first. `--shipped` measures the shipped form alone. Take minutes of a quiet card: about one and a half. Exit code: 1 if
bits differed or the shipped form did not run, else 0.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from engines.bundled.gpu.tensorcore.attention import attend
from engines.bundled.gpu.tensorcore.layout import padded_chunks
from engines.bundled.gpu.tensorcore.operators import Heads, Rows
from engines.bundled.gpu.tensorcore.tiles import FORM, Form

Tensor = torch.Tensor
HEADS, KV, DIM, PAGE = 32, 8, 128, 16
DECODES = ((1, 1024), (1, 8192), (16, 1024), (16, 8192), (256, 512), (256, 1024), (256, 8192))  # sequences, keys
PREFILLS = ((1, 512), (16, 1024), (1, 8192))  # sequences, tokens
BYTES_A_SECOND, OPERATIONS_A_SECOND = 4.3e12, 790e12  # what one H200 copies, and multiplies in bfloat16
# keys, step, decode warps and stages, rows, prefill warps and stages
SWEEP = (
    (256, 64, 4, 3, 128, 8, 2),
    (256, 64, 4, 2, 128, 8, 3),
    (256, 64, 4, 4, 64, 4, 2),
    (256, 64, 2, 3, 64, 4, 1),
    (256, 64, 8, 3, 128, 8, 1),
    (256, 64, 2, 3, 128, 8, 3),
    (512, 64, 4, 3, 128, 8, 2),
    (512, 64, 4, 2, 128, 8, 3),
    (512, 64, 4, 4, 64, 4, 2),
    (512, 64, 2, 3, 128, 8, 3),
    (256, 128, 4, 2, 128, 8, 2),
    (512, 128, 8, 2, 128, 8, 2),
    (1024, 64, 4, 3, 128, 8, 2),
)
START = time.monotonic()


def say(*words: object) -> None:
    print(f"[{time.monotonic() - START:6.1f}]", *words, flush=True)


def forms(shipped: bool) -> dict[str, Form]:
    """By name: what decides on bits, then the rest."""
    chosen = [FORM] if shipped else [FORM, *(Form(*values, merged=FORM.merged) for values in SWEEP)]
    return {name_of(form): form for form in chosen}


def name_of(form: Form) -> str:
    return (
        f"{family(form)} | decode {form.decode_warps} warps {form.decode_stages} stages | prefill {form.rows} rows "
        f"{form.prefill_warps} warps {form.prefill_stages} stages"
    )


def family(form: Form) -> str:
    """Forms of one family must give the same bits."""
    return f"splits of {form.keys}, steps of {form.step}"


class Case:
    """Keys, values, queries and pages of some sequences of one length; `tokens` of them are asked for, the newest."""

    def __init__(self, sequences: int, length: int, tokens: int) -> None:
        make = torch.Generator("cuda").manual_seed(sequences * length)
        slots = sequences * length
        self.sequences, self.length, self.tokens = sequences, length, tokens
        self.cache = tuple(
            torch.randn((slots, KV, DIM), generator=make, device="cuda", dtype=torch.bfloat16) for _ in range(2)
        )
        self.pages = torch.randperm(slots // PAGE, generator=make, device="cuda").int().view(sequences, -1)
        count = sequences * tokens
        self.qkv = torch.randn((count, (HEADS + 2 * KV) * DIM), generator=make, device="cuda", dtype=torch.bfloat16)
        self.sequence = torch.arange(sequences, device="cuda", dtype=torch.int32).repeat_interleave(tokens)
        self.position = torch.arange(length - tokens, length, device="cuda", dtype=torch.int32).repeat(sequences)

    def rows(self, form: Form, alone: Tensor | None = None) -> Rows:
        """All tokens in tiles, or some alone."""
        none = self.sequence[:0]
        common = {"token": self.sequence, "sequence": self.sequence, "position": self.position, "pages": self.pages}
        if alone is not None:
            return Rows(**common, alone=alone, tile_token=none, tile_count=none, tile_sequence=none, pieces=(),
                        chunks=padded_chunks(self.length, form.keys))  # fmt: skip
        each = heads_of(form).tile_tokens
        first = torch.arange(0, len(self.qkv), each, device="cuda", dtype=torch.int32)
        return Rows(**common, alone=none, tile_token=first, tile_count=torch.full_like(first, each),
                    tile_sequence=first // self.tokens, pieces=(), chunks=1)  # fmt: skip

    def attended(self, form: Form, alone: Tensor | None = None) -> Callable[[], Tensor]:
        rows, heads = self.rows(form, alone), heads_of(form)
        return lambda: attend(self.qkv, rows, self.cache, heads)

    def dense(self) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v as torch wants them, the pages put in order."""
        k, v = (
            pool.view(-1, PAGE, KV, DIM)[self.pages.long()].reshape(self.sequences, self.length, KV, DIM)
            for pool in self.cache
        )
        q = self.qkv[:, : HEADS * DIM].reshape(self.sequences, self.tokens, HEADS, DIM)
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)


def heads_of(form: Form) -> Heads:
    return Heads(heads=HEADS, kv=KV, dim=DIM, page=PAGE, keys=form.keys, form=form)


def compile_form(form: Form) -> str | None:
    """Launches every kernel of a form on little data, which leaves it in the compile cache; what went wrong, if so."""
    try:
        with torch.inference_mode():
            for splits in (1, 2):
                case = Case(1, splits * form.keys, 64)
                case.attended(form)()
                case.attended(form, torch.arange(64, device="cuda", dtype=torch.int32))()
            torch.cuda.synchronize()
    except Exception as error:  # noqa: BLE001 - a form that does not run is a result
        return f"{type(error).__name__}: {str(error)[-300:]}"
    return None


def compile_all(named: dict[str, Form]) -> dict[str, str]:
    """In forked processes, before this one uses the device. Names of forms that do not run, with the reason."""
    with multiprocessing.get_context("fork").Pool(min(len(named), os.cpu_count() or 1)) as pool:
        reasons = pool.map(compile_form, named.values(), chunksize=1)
    return {name: reason for name, reason in zip(named, reasons, strict=True) if reason}


def time_graph(call: Callable[[], object], budget_s: float = 0.15) -> float:
    """Microseconds per call, replayed as a graph: the median of five samples."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(8):
            call()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    found: list[float] = []
    for sample in range(6):
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        if sample:
            found.append(1e3 * begin.elapsed_time(end) / 8)
        if sum(found) * 8e-6 > budget_s:
            break
    return round(statistics.median(found), 2)


def sdpa(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Tensor:
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)


def floor_us(sequences: int, length: int, tokens: int) -> float:
    """The larger of the bytes and the operations that have to be."""
    moved = 4 * sequences * length * KV * DIM + 4 * sequences * tokens * HEADS * DIM
    pairs = sequences * (tokens * length - tokens * (tokens - 1) / 2)
    return round(1e6 * max(moved / BYTES_A_SECOND, 4 * pairs * HEADS * DIM / OPERATIONS_A_SECOND), 1)


def error_of(found: Tensor, q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> float:
    """Relative error of the first sequence against float32."""
    q, k, v = (x[:1].float() for x in (q, k, v))
    k, v = (x.repeat_interleave(HEADS // KV, 1) for x in (k, v))
    exact = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)
    exact = exact.transpose(1, 2).reshape(-1, HEADS * DIM)
    return float((found[: len(exact)].float() - exact).norm() / exact.norm())


def measure(named: dict[str, Form], sequences: int, length: int, tokens: int) -> dict[str, object]:
    """One row of the table: decode for one token a sequence, prefill otherwise."""
    case, decoding = Case(sequences, length, tokens), tokens == 1
    alone = torch.arange(sequences, device="cuda", dtype=torch.int32) if decoding else None
    dense = case.dense()
    row: dict[str, object] = {
        "floor": floor_us(sequences, length, tokens),
        "sdpa": time_graph(lambda: sdpa(*dense, causal=not decoding)),
    }
    references: dict[str, Tensor] = {}
    differing, timed = {}, {}
    small = sequences * length <= 16 * 1024
    for name, form in named.items():
        part = name.split(" | ")[1 if decoding else 2]
        key = f"{family(form)} | {part}"
        if key in timed:
            continue
        call = case.attended(form, alone)
        out = call().clone()
        if family(form) not in references:
            references[family(form)] = out
            if small:
                row[f"relative error, {family(form)}"] = error_of(out, *dense, causal=not decoding)
        differing[key] = int((out.view(torch.int16) != references[family(form)].view(torch.int16)).sum())
        if small and not decoding:
            every = torch.arange(0, len(case.qkv), 7, device="cuda", dtype=torch.int32)
            single = case.attended(form, every)()[every.long()]
            differing[f"{key} | alone"] = int((single.view(torch.int16) != out[every.long()].view(torch.int16)).sum())
        timed[key] = time_graph(call)
    row |= {"differing": {key: count for key, count in differing.items() if count}, "compared": len(differing)}
    return row | {"us": dict(sorted(timed.items(), key=lambda item: item[1]))}


def geometric_means(rows: dict[str, dict[str, object]]) -> dict[str, dict[str, float]]:
    """Time against torch's over the rows, by form; decode and prefill apart."""
    found: dict[str, dict[str, float]] = {}
    for kind in ("decode", "prefill"):
        chosen = [row for name, row in rows.items() if name.startswith(kind)]
        keys = set.intersection(*(set(row["us"]) for row in chosen))
        means = {
            key: math.exp(statistics.fmean(math.log(row["us"][key] / row["sdpa"]) for row in chosen)) for key in keys
        }
        found[kind] = {key: round(value, 3) for key, value in sorted(means.items(), key=lambda item: item[1])}
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shipped", action="store_true", help="the shipped form alone")
    parser.add_argument("--out", type=Path, required=True, help="the JSON file")
    options = parser.parse_args()
    named = forms(options.shipped)
    refused = compile_all(named)
    say("compiled", len(named), "refused", refused)
    named = {name: form for name, form in named.items() if name not in refused}
    results: dict[str, object] = {"refused": refused, "shipped": name_of(FORM)}
    rows: dict[str, dict[str, object]] = {}
    with torch.inference_mode():
        results["device"] = f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
        for kind, sizes in (("decode", DECODES), ("prefill", PREFILLS)):
            for sequences, length in sizes:
                name = f"{kind} {sequences} x {length}"
                rows[name] = measure(named, sequences, length, 1 if kind == "decode" else length)
                torch.cuda.empty_cache()
                results["rows"] = rows
                options.out.write_text(json.dumps(results, indent=1))
                best = next(iter(rows[name]["us"].items()))
                say(name, "floor", rows[name]["floor"], "sdpa", rows[name]["sdpa"], "best", *best,
                    "differing", rows[name]["differing"])  # fmt: skip
    results["against sdpa"] = means = geometric_means(rows)
    options.out.write_text(json.dumps(results, indent=1))
    for kind, by_form in means.items():
        for form, ratio in list(by_form.items())[:6]:
            say(kind, ratio, form)
    return 1 if name_of(FORM) in refused or any(row["differing"] for row in rows.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
