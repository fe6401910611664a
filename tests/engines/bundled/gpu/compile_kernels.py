"""Compiles `tensorcore` kernels for a compute capability, without a GPU, and prints what the PTX holds as JSON.

Run as `python compile_kernels.py 80`, in a process of its own: the tests' process has Triton's interpreter.
"""

from __future__ import annotations

import json
import re
import sys

from triton import compile as compile_kernel
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from engines.bundled.gpu.tensorcore import attention_kernels, expert_kernels, kernels, softmax_kernels, tree_kernels

MODULES = (kernels, attention_kernels, expert_kernels, softmax_kernels, tree_kernels)
ATTENTION = {"HEADS": 8, "KV": 2, "DIM": 64, "BD": 64, "PAGE": 16, "KEYS": 512, "STEP": 64, "LEVELS": 6}
CASES = {
    "linear_kernel": ({"EVEN": True, "BM": 64, "BN": 64, "BK": 64, "GROUP": 8}, {"num_warps": 4, "num_stages": 3}),
    "decode_kernel": (
        {**ATTENTION, "PADDED": 16, "WINDOW": 200, "WHOLE": False},
        {"num_warps": 4, "num_stages": 3, "enable_fp_fusion": False},
    ),
    "decode_merge_kernel": (
        {"HEADS": 8, "DIM": 64, "BD": 64, "KEYS": 512, "UNROLL": 8, "WINDOW": 200},
        {"num_warps": 1, "enable_fp_fusion": False},
    ),
    "prefill_kernel": (
        {**ATTENTION, "PADDED": 4, "ROWS": 128, "WINDOW": 0},
        {"num_warps": 8, "num_stages": 3, "enable_fp_fusion": False},
    ),
    "route_kernel": ({"BLOCK": 128}, {"num_warps": 4, "enable_fp_fusion": False}),
    "expert_kernel": ({"BM": 16, "BN": 64, "BK": 128}, {"num_warps": 4, "num_stages": 3}),
    "mix_kernel": ({"BLOCK": 1024}, {"num_warps": 4, "enable_fp_fusion": False}),
    "tree_linear_kernel": (
        {"CHUNKS": 4, "EVEN": True, "BM": 64, "BN": 64, "BK": 128, "GROUP": 8},
        {"num_warps": 8, "num_stages": 3},
    ),
    "tree_sum_kernel": ({"COUNT": 8, "BLOCK": 1024}, {"num_warps": 4}),
    "chunk_sum_kernel": (
        {"VOCAB": 49152, "CHUNKS": 64, "HELD": 8}, {"num_warps": 4, "enable_fp_fusion": False},
    ),
    "log_sum_kernel": ({"CHUNKS": 64, "LEVELS": 6}, {"num_warps": 4, "enable_fp_fusion": False}),
}  # fmt: skip
OTHERS = {
    "route_kernel": {"weight": "*fp32"},
    "mix_kernel": {"weight": "*fp32"},
    "tree_linear_kernel": {"out": "*fp32"},
    "tree_sum_kernel": {"partial": "*fp32"},
    "chunk_sum_kernel": {"top": "*fp32", "sums": "*fp32"},
    "log_sum_kernel": {"sums": "*fp32", "out": "*fp32"},
}
INTS = ("expert", "token", "sequence", "position", "pages", "tile_token", "tile_count", "tile_sequence")
FLOATS = ("tops", "totals", "outs")
SCALARS = {"rows": "i32", "N": "i32", "K": "i32", "pitch": "i32", "splits": "i32", "tiles": "i32", "scale": "fp32"}
SCALARS |= dict.fromkeys(("experts", "k", "fan", "columns", "x_stride", "weight_stride", "width", "size"), "i32")


def compile_one(name: str, capability: int) -> dict[str, object]:
    constants, options = CASES[name]
    function = next(getattr(module, name) for module in MODULES if hasattr(module, name))
    kinds = {
        **dict.fromkeys(INTS, "*i32"),
        **dict.fromkeys(FLOATS, "*fp32"),
        **SCALARS,
        **OTHERS.get(name, {}),
        **dict.fromkeys(constants, "constexpr"),
    }
    signature = {argument: kinds.get(argument, "*bf16") for argument in function.arg_names}
    places = {(function.arg_names.index(key),): value for key, value in constants.items()}
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, argument in enumerate(function.arg_names)
        if signature[argument].startswith("*") or argument in ("N", "K", "x_stride", "weight_stride", "width")
    }
    source = ASTSource(function, signature, places, aligned)
    compiled = compile_kernel(source, target=GPUTarget("cuda", capability, 32), options=options)
    ptx = compiled.asm["ptx"]
    return {
        "fma": len(re.findall(r"\bfma\.", ptx)),
        "inexact": len(re.findall(r"\.(?:approx|ftz|full)\b", ptx)),
        "atomics": len(re.findall(r"\b(?:atom|red)\.", ptx)),
        "matrix": "wgmma" if "wgmma.mma_async" in ptx else "mma" if "mma.sync" in ptx else "none",
        "shared": compiled.metadata.shared,
    }


if __name__ == "__main__":
    print(json.dumps({name: compile_one(name, int(sys.argv[1])) for name in CASES}))
