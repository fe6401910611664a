"""Loads the kernels and speaks to the compiled ones in numpy arrays.

It does not know models or requests. Rules: arrays are checked for type, layout and size before a pointer leaves
Python; a code other than 0 becomes a KernelError; which backend was chosen, and why, is part of the object.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache

import numpy as np
import numpy.typing as npt

from engines.bundled.config import Float32, Int32
from engines.bundled.kernels.build import COMPILERS, Library, build, find_compiler
from engines.bundled.kernels.interface import Backend, KernelError, Kernels, Pages, Rows, Weight
from engines.bundled.kernels.isa import resolve_isa
from engines.bundled.kernels.parameters import check_draw, check_experts, check_heads, check_top_k

_CODES = {
    1: "the floating-point environment cannot be set: rounding to nearest with subnormals kept is not what it does",
    2: "out of memory",
    3: "an argument out of range",
}
# How a weight is stored: see kernels.cpp, section weights.
FLOATS, NIBBLES, BYTES, CODE_ROWS = 0, 4, 8, 32
# Argument letters: p pointer, l long, i int, f float.
_SIGNATURES = {
    "sb_pack": "pplli",
    "sb_encode": "pppllii" + "p",
    "sb_linear": "pipppllllii",
    "sb_rms_norm": "pppllfi",
    "sb_swiglu": "pplli",
    "sb_rope_store": "ppppplpplllll" + "i",
    "sb_attend": "pppplppplllll" + "flli",
    "sb_add_bias": "pplli",
    "sb_norm_heads": "pppllllfi",
    "sb_route": "plllppi",
    "sb_combine": "pppllli",
    "sb_exp": "ppli",
    "sb_log": "ppli",
    "sb_log_softmax": "pplli",
    "sb_check_finite": "pllp",
    "sb_top_k": "plllp",
    "sb_draw": "plflfffp",
}
_TYPES = {"p": ctypes.c_void_p, "l": ctypes.c_long, "i": ctypes.c_int, "f": ctypes.c_float}


def load(isa: str, compiler: str) -> Kernels:
    """Kernels for `isa` ("auto", "x86-64-v3", "x86-64-v4", "generic") built by `compiler` ("auto", "g++", "clang++").

    `compiler` "none", or "auto" where none is installed, gives the checked fallback.

    Raises:
        KernelError: an instruction set this CPU lacks, a compiler that is missing or fails, a failed self-check.
    """
    if compiler not in ("auto", "none", *COMPILERS):
        raise KernelError(f"compiler: expected auto, none, {', '.join(COMPILERS)}, got {compiler!r}")
    program = None if compiler == "none" else find_compiler(compiler)
    if program is None and compiler in COMPILERS:
        raise KernelError(f"compiler {compiler}: not installed; install it, or use compiler=auto or compiler=none")
    if program is None:
        reason = "compiler=none" if compiler == "none" else f"no C++ compiler ({' or '.join(COMPILERS)}) is installed"
        from engines.bundled.kernels.fallback import open_fallback

        return open_fallback(reason)
    return _load(resolve_isa(isa), program)


@cache
def _load(isa: str, program: str) -> CompiledKernels:
    return CompiledKernels(build(isa, program), f"compiled by {program}")


def _pointer(array: npt.NDArray[np.generic]) -> int:
    return int(array.__array_interface__["data"][0])


def _dense(array: Float32 | Int32, dtype: type, name: str) -> int:
    """The address of a C-contiguous array of `dtype`."""
    if array.dtype != dtype or not array.flags.c_contiguous:
        raise ValueError(
            f"{name}: expected a C-contiguous {np.dtype(dtype).name} array, got {array.dtype} {array.strides}"
        )
    return _pointer(array)


def _expect(name: str, shape: tuple[int, ...], expected: tuple[int, ...]) -> None:
    if shape != expected:
        raise ValueError(f"{name}: expected shape {expected}, got {shape}")


class CompiledKernels:
    """The kernels of kernels.cpp in one compiled library."""

    backend: Backend = "kernels"

    def __init__(self, library: Library, reason: str) -> None:
        self.isa = library.isa
        self.compiler = library.compiler
        self.digest = library.digest
        self.reason = reason
        try:
            self._library = ctypes.CDLL(str(library.path))
        except OSError as error:
            raise KernelError(f"{library.path}: cannot be loaded ({error}); delete it to build it again") from error
        self._calls = {name: self._bind(name, letters) for name, letters in _SIGNATURES.items()}
        self._panel = int(ctypes.CFUNCTYPE(ctypes.c_long)(("sb_panel", self._library))())

    def _bind(self, name: str, letters: str) -> Callable[..., int]:
        function = getattr(self._library, name)
        function.argtypes = [_TYPES[letter] for letter in letters]
        function.restype = ctypes.c_int
        return function  # type: ignore[no-any-return]

    def _call(self, name: str, *arguments: float) -> None:
        code = self._calls[name](*arguments)
        if code != 0:
            raise KernelError(f"{name}: {_CODES.get(code, f'code {code}')}")

    def pack(self, weight: Float32, threads: int) -> Weight:
        for kind in (NIBBLES, BYTES):
            if (coded := self._encode(weight, kind, threads)) is not None:
                return coded
        rows, columns = weight.shape
        data = aligned_empty((self._panels(rows), columns, self._panel))
        self._call("sb_pack", _dense(weight, np.float32, "weight"), _pointer(data), rows, columns, threads)
        return Weight(rows=rows, columns=columns, kind=FLOATS, data=data, scales=np.empty(0, np.float32))

    def _encode(self, weight: Float32, kind: int, threads: int) -> Weight | None:
        """The weight as exact codes, or None where they would not give back every bit."""
        rows, columns = weight.shape
        if columns % CODE_ROWS:
            return None
        panels, exact = self._panels(rows), ctypes.c_int(0)
        data = np.zeros((panels, columns // 2 if kind == NIBBLES else columns, self._panel), np.uint8)
        scales = np.zeros((panels, columns // CODE_ROWS, 2, self._panel), np.float32)
        pointers = (_dense(weight, np.float32, "weight"), _pointer(data), _pointer(scales))
        self._call("sb_encode", *pointers, rows, columns, kind, threads, ctypes.addressof(exact))
        return Weight(rows=rows, columns=columns, kind=kind, data=data, scales=scales) if exact.value else None

    def _panels(self, rows: int) -> int:
        return -(-rows // self._panel)

    def linear(self, x: Float32, weight: Weight, width: int, threads: int, out: Float32) -> None:
        self._linear(x, weight, width, threads, out, 0)

    def linear_add(self, x: Float32, weight: Weight, width: int, threads: int, out: Float32) -> None:
        self._linear(x, weight, width, threads, out, 1)

    def _linear(self, x: Float32, weight: Weight, width: int, threads: int, out: Float32, add: int) -> None:
        count = len(x)
        _expect("x", x.shape, (count, weight.columns))
        _expect("out", out.shape, (count, weight.rows))
        self._call(
            "sb_linear",
            _dense(x, np.float32, "x"),
            weight.kind,
            _pointer(weight.data),
            _pointer(weight.scales),
            _dense(out, np.float32, "out"),
            count,
            weight.rows,
            weight.columns,
            width,
            add,
            threads,
        )

    def rms_norm(self, x: Float32, gain: Float32, eps: float, threads: int, out: Float32) -> None:
        count, size = x.shape
        _expect("gain", gain.shape, (size,))
        _expect("out", out.shape, x.shape)
        pointers = (_dense(x, np.float32, "x"), _dense(gain, np.float32, "gain"), _dense(out, np.float32, "out"))
        self._call("sb_rms_norm", *pointers, count, size, eps, threads)

    def swiglu(self, gate_up: Float32, threads: int, out: Float32) -> None:
        count, size = out.shape
        _expect("gate_up", gate_up.shape, (count, 2 * size))
        pointers = (_dense(gate_up, np.float32, "gate_up"), _dense(out, np.float32, "out"))
        self._call("sb_swiglu", *pointers, count, size, threads)

    def rope_store(self, qkv: Float32, cos_sin: Float32, rows: Rows, pages: Pages, threads: int) -> None:
        _, kv_heads, dim, page_size = pages.keys.shape
        heads = qkv.shape[1] // dim - 2 * kv_heads
        self._call(
            "sb_rope_store",
            _dense(qkv, np.float32, "qkv"),
            _dense(cos_sin, np.float32, "cos_sin"),
            *_cache(rows, pages),
            len(qkv),
            heads,
            kv_heads,
            dim,
            page_size,
            threads,
        )

    def add_bias(self, y: Float32, bias: Float32, threads: int) -> None:
        count, size = y.shape
        _expect("bias", bias.shape, (size,))
        self._call("sb_add_bias", _dense(y, np.float32, "y"), _dense(bias, np.float32, "bias"), count, size, threads)

    def norm_heads(
        self, qkv: Float32, q_gain: Float32, k_gain: Float32, kv_heads: int, eps: float, threads: int
    ) -> None:
        heads = check_heads(qkv, q_gain, k_gain, kv_heads)
        pointers = (_dense(qkv, np.float32, "qkv"), _dense(q_gain, np.float32, "q"), _dense(k_gain, np.float32, "k"))
        self._call("sb_norm_heads", *pointers, len(qkv), heads, kv_heads, len(q_gain), eps, threads)

    def attend(
        self,
        qkv: Float32,
        rows: Rows,
        pages: Pages,
        heads: int,
        key_chunk: int,
        window: int,
        threads: int,
        out: Float32,
    ) -> None:
        _, kv_heads, dim, page_size = pages.keys.shape
        _expect("qkv", qkv.shape, (len(qkv), (heads + 2 * kv_heads) * dim))
        _expect("out", out.shape, (len(qkv), heads * dim))
        self._call(
            "sb_attend",
            _dense(qkv, np.float32, "qkv"),
            *_cache(rows, pages),
            _dense(out, np.float32, "out"),
            len(qkv),
            heads,
            kv_heads,
            dim,
            page_size,
            score_scale(dim),
            key_chunk,
            window,
            threads,
        )

    def route(self, logits: Float32, k: int, threads: int) -> tuple[Int32, Float32]:
        count, size = logits.shape
        check_experts(k, size)
        ids, weights = np.empty((count, k), np.int32), np.empty((count, k), np.float32)
        address, where = _dense(logits, np.float32, "logits"), (_pointer(ids), _pointer(weights))
        self._call("sb_route", address, count, size, k, *where, threads)
        return ids, weights

    def combine(self, outputs: Float32, weights: Float32, threads: int) -> Float32:
        count, k, size = outputs.shape
        _expect("weights", weights.shape, (count, k))
        out = np.empty((count, size), np.float32)
        pointers = (_dense(outputs, np.float32, "outputs"), _dense(weights, np.float32, "weights"), _pointer(out))
        self._call("sb_combine", *pointers, count, k, size, threads)
        return out

    def exp(self, x: Float32) -> Float32:
        return self._map("sb_exp", x)

    def log(self, x: Float32) -> Float32:
        return self._map("sb_log", x)

    def _map(self, name: str, x: Float32) -> Float32:
        out = np.empty_like(x)
        self._call(name, _dense(x, np.float32, "x"), _pointer(out), x.size, 1)
        return out

    def log_softmax(self, logits: Float32, threads: int = 1) -> Float32:
        out = np.empty_like(logits)
        self._call("sb_log_softmax", _dense(logits, np.float32, "logits"), _pointer(out), *logits.shape, threads)
        return out

    def check_finite(self, logits: Float32) -> int:
        row = ctypes.c_long(-1)
        self._call("sb_check_finite", _dense(logits, np.float32, "logits"), *logits.shape, ctypes.addressof(row))
        return row.value

    def argmax(self, logits: Float32) -> Int32:
        return self.top_k(logits, 1).reshape(-1)

    def top_k(self, logits: Float32, k: int) -> Int32:
        count, size = logits.shape
        check_top_k(k, size)
        out = np.empty((count, k), np.int32)
        self._call("sb_top_k", _dense(logits, np.float32, "logits"), count, size, k, _pointer(out))
        return out

    def draw(self, logits: Float32, temperature: float, top_k: int, top_p: float, min_p: float, u: float) -> int:
        check_draw(logits, temperature, top_k, top_p, min_p, u)
        picked = ctypes.c_int32(-1)
        address = _dense(logits, np.float32, "logits")
        where = ctypes.addressof(picked)
        self._call("sb_draw", address, logits.size, temperature, top_k, top_p, min_p, u, where)
        return picked.value

    def threads_seen(self) -> int:
        return int(self._library.sb_threads_seen())


def _cache(rows: Rows, pages: Pages) -> tuple[int, ...]:
    """Addresses of pages, page table and rows, in the order the kernels take them."""
    return (
        _dense(pages.keys, np.float32, "keys"),
        _dense(pages.values, np.float32, "values"),
        _dense(rows.page_table, np.int32, "page_table"),
        rows.page_table.shape[1],
        _dense(rows.sequence, np.int32, "sequence"),
        _dense(rows.position, np.int32, "position"),
    )


def score_scale(dim: int) -> float:
    """The float32 nearest to 1 / sqrt(dim)."""
    return float(np.float32(1.0 / np.sqrt(np.float64(dim))))


def aligned_empty(shape: tuple[int, ...]) -> Float32:
    """An uninitialised float32 array that starts on a cache line."""
    size = int(np.prod(shape))
    raw = np.empty(size + 16, np.float32)
    start = (-_pointer(raw) % 64) // 4
    return raw[start : start + size].reshape(shape)
