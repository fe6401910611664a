"""The argument structures of the kernels, as ctypes. Field order is that of the structures in kernels/*.cu.

It does not launch. Rules: pointers come first, then ints, then floats; a missing or unknown name is an error.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from functools import cache

_TYPES = {"p": ctypes.c_void_p, "i": ctypes.c_int, "f": ctypes.c_float}
_LINEAR = "x:p weight:p bias:p out:p partial:p M:i N:i K:i width:i sum:i share:i"
_ATTENTION = (
    "qkv:p keys:p values:p table:p sequence:p position:p tile_row:p tile_count:p scores:p maxima:p sums:p outputs:p "
    "out:p pages:i chunks:i key_chunk:i first_row:i window:i scale:f"
)
_DECODE = (
    "base:p parts:p stream:p gain:p front:p bias:p back:p exchange:p result:p embedding:p token:p cos_sin:p keys:p "
    "values:p table:p sequence:p position:p maxima:p sums:p outputs:p done:p previous:p stale:p other:p "
    "M:i pages:i expected:i eps:f scale:f"
)
_RESIDENT = (
    "layers:p embedding:p token:p cos_sin:p table:p sequence:p position:p begin:p middle:p attended:p gated:p "
    "gain:p row:p out:p epoch:p count:i pages:i M:i rows:i eps:f scale:f"
)
_EXPERT = "x:p weight:p out:p expert:p tile_expert:p tile_pair:p N:i K:i width:i share:i fan:i stride:i"
_ROPE = "qkv:p cos_sin:p keys:p values:p table:p sequence:p position:p pages:i"
FIELDS: dict[str, str] = {
    "pack": "weight:p out:p N:i K:i padded:i",
    "embed": "table:p token:p out:p",
    "rms_norm": "x:p gain:p row:p out:p gathered:i eps:f",
    "norm_heads": "qkv:p q_gain:p k_gain:p eps:f",
    "rope_store": _ROPE,
    "swiglu_rows": "gate_up:p out:p M:i",
    "exponential": "x:p out:p n:i",
    "log_softmax": "logits:p out:p n:i",
    **{f"few_rows_{rows}": _LINEAR for rows in (1, 2, 4, 8)},
    **{f"many_rows_{tile}": _LINEAR for tile in ("any", "32", "64", "64x128", "128")},
    **{f"{stage}_{size}": _ATTENTION for stage in ("scores", "weigh") for size in (4, 16)},
    "combine_chunks": _ATTENTION,
    "route": "logits:p expert:p weight:p experts:i k:i",
    "group_pairs": "expert:p tile_expert:p tile_pair:p pairs:i experts:i rows:i tiles:i",
    **{f"expert_rows_{rows}": _EXPERT for rows in (1, 8)},
    "swiglu_pairs": "gate_up:p out:p pairs:i inner:i",
    "mix_experts": "said:p weight:p hidden:p k:i",
    "take_columns": "x:p out:p M:i K:i begin:i count:i",
    "complete_tree": "sums:p program:p hidden:p size:i steps:i",
}
FUSED_FIELDS: dict[str, str] = {
    **{f"decode_{part}_{rows}": _DECODE for part in ("attention", "mlp") for rows in (1, 8)},
    **{f"decode_resident_{reach}": _RESIDENT for reach in ("near", "far", "2", "4")},
    "decode_finish": "base:p parts:p gain:p row:p out:p M:i eps:f",
}


@cache
def structure_of(kernel: str) -> type[ctypes.Structure]:
    """The ctypes structure of a kernel's arguments. Raises KeyError for a kernel that does not exist."""
    text = (FIELDS | FUSED_FIELDS)[kernel]
    fields = [(name, _TYPES[kind]) for name, kind in (part.split(":") for part in text.split())]
    return type(f"{kernel}_arguments", (ctypes.Structure,), {"_fields_": fields})


def pack_arguments(kernel: str, values: Mapping[str, int | float]) -> ctypes.Structure:
    """The filled structure. Raises ValueError for names that are missing or not the kernel's."""
    kind = structure_of(kernel)
    names = [field[0] for field in kind._fields_]
    if sorted(names) != sorted(values):
        wrong = sorted(set(names) ^ set(values))
        raise ValueError(f"kernel {kernel}: missing or unknown arguments {', '.join(wrong)}")
    return kind(**values)
