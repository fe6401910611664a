"""Environment variables that can move a bit: which, in what, and why.

It does not know how an engine is started. Rules: one row per variable; an unset variable is the value "not
set"; a value that holds a path is recorded as a digest, since paths name users and machines. Variables that
change speed alone are left out.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from harness.engine import Field, FieldClass

NOT_SET = "not set"


class Variable(NamedTuple):
    """One row: the variable, what reads it, what it can change, and the class of its field."""

    name: str
    engines: str
    reason: str
    field_class: FieldClass = "identity"


VARIABLES: tuple[Variable, ...] = (
    Variable("ATEN_CPU_CAPABILITY", "torch", "chooses the vector width of torch's own CPU kernels"),
    Variable("BLIS_ARCH_TYPE", "BLIS", "forces a kernel family"),
    Variable("BLIS_NUM_THREADS", "BLIS", "splits of a matrix product follow the thread count"),
    Variable("CUBLAS_WORKSPACE_CONFIG", "CUDA", "run-to-run stability of cuBLAS across streams"),
    Variable("CUDA_VISIBLE_DEVICES", "CUDA", "which devices, and in what order, ranks get", "lineage"),
    Variable("DNNL_DEFAULT_FPMATH_MODE", "oneDNN", "lets float32 products run in a narrower type (old name)"),
    Variable("DNNL_MAX_CPU_ISA", "oneDNN", "caps the instruction set of its kernels (old name)"),
    Variable("GLIBC_TUNABLES", "glibc", "hwcaps choose another variant of libm's functions"),
    Variable("GOMP_CPU_AFFINITY", "libgomp", "bounds the cores, and so the threads, of a parallel region"),
    Variable("KMP_AFFINITY", "libiomp5", "bounds the cores of a parallel region"),
    Variable("KMP_DETERMINISTIC_REDUCTION", "libiomp5", "fixes the order of OpenMP reductions"),
    Variable("LD_LIBRARY_PATH", "all", "loads other builds of BLAS, OpenMP or libm"),
    Variable("LD_PRELOAD", "all", "replaces functions of libm or BLAS"),
    Variable("MKL_CBWR", "MKL", "conditional numerical reproducibility: chooses the code path"),
    Variable("MKL_DYNAMIC", "MKL", "lets MKL use fewer threads than asked"),
    Variable("MKL_ENABLE_INSTRUCTIONS", "MKL", "caps the instruction set of its kernels"),
    Variable("MKL_NUM_THREADS", "MKL", "splits of a matrix product follow the thread count"),
    Variable("NCCL_ALGO", "NCCL", "order of an all-reduce (ring, tree)"),
    Variable("NCCL_MAX_NCHANNELS", "NCCL", "how an all-reduce is cut into channels"),
    Variable("NCCL_MIN_NCHANNELS", "NCCL", "how an all-reduce is cut into channels"),
    Variable("NCCL_NTHREADS", "NCCL", "how a channel is cut among threads"),
    Variable("NCCL_NVLS_ENABLE", "NCCL", "sums inside the switch, in an order of its own"),
    Variable("NCCL_P2P_DISABLE", "NCCL", "changes the transport and with it the algorithm chosen"),
    Variable("NCCL_PROTO", "NCCL", "protocol, which sets chunk sizes of an all-reduce"),
    Variable("NPY_DISABLE_CPU_FEATURES", "numpy", "chooses other vector kernels, whose last bits differ"),
    Variable("NPY_ENABLE_CPU_FEATURES", "numpy", "chooses other vector kernels, whose last bits differ"),
    Variable("NVIDIA_TF32_OVERRIDE", "CUDA", "turns TF32 off under every library"),
    Variable("OMP_DYNAMIC", "OpenMP", "lets the runtime use fewer threads than asked"),
    Variable("OMP_NUM_THREADS", "OpenMP", "splits of sums follow the thread count"),
    Variable("OMP_PLACES", "OpenMP", "bounds the threads of a parallel region"),
    Variable("OMP_PROC_BIND", "OpenMP", "bounds the threads of a parallel region"),
    Variable("OMP_SCHEDULE", "OpenMP", "which thread sums which part, where a loop asks for it"),
    Variable("OMP_THREAD_LIMIT", "OpenMP", "caps the thread count"),
    Variable("ONEDNN_DEFAULT_FPMATH_MODE", "oneDNN", "lets float32 products run in a narrower type"),
    Variable("ONEDNN_MAX_CPU_ISA", "oneDNN", "caps the instruction set of its kernels"),
    Variable("OPENBLAS_CORETYPE", "OpenBLAS", "forces a kernel family"),
    Variable("OPENBLAS_NUM_THREADS", "OpenBLAS", "splits of a matrix product follow the thread count"),
    Variable("PYTHONHASHSEED", "Python", "iteration order of sets, and hashes built on hash()"),
    Variable("SGLANG_ENABLE_DETERMINISTIC_INFERENCE", "SGLang", "its batch-invariant kernels"),
    Variable("SGLANG_FLASHINFER_DECODE_SPLIT_TILE_SIZE", "SGLang", "fixes the KV split of decode"),
    Variable("SGLANG_FLASHINFER_PREFILL_SPLIT_TILE_SIZE", "SGLang", "fixes the KV split of prefill"),
    Variable("SGLANG_TRITON_PREFILL_TRUNCATION_ALIGN_SIZE", "SGLang", "where a chunked prefill is cut"),
    Variable("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "torch", "turns TF32 on for float32 products"),
    Variable("VLLM_ATTENTION_BACKEND", "vLLM", "chooses the attention kernel"),
    Variable("VLLM_BATCH_INVARIANT", "vLLM", "its batch-invariant kernels"),
    Variable("VLLM_CPU_ATTN_SPLIT_KV", "vLLM", "whether attention on the CPU splits keys among threads"),
    Variable("VLLM_CPU_KVCACHE_SPACE", "vLLM", "KV blocks, and with them preemption"),
    Variable("VLLM_CPU_OMP_THREADS_BIND", "vLLM", "thread count per rank on the CPU"),
    Variable("VLLM_CPU_SGL_KERNEL", "vLLM", "chooses another CPU kernel for small batches"),
    Variable("VLLM_USE_FLASHINFER_SAMPLER", "vLLM", "chooses the sampler's kernel"),
)


def variable_fields(environ: Mapping[str, str], table: Iterable[Variable] = VARIABLES) -> tuple[Field, ...]:
    """One field `env.NAME` per variable of the table."""
    return tuple(
        Field(
            name=f"env.{row.name}",
            value=_public(environ[row.name]) if row.name in environ else NOT_SET,
            field_class=row.field_class,
            source=f"environment; {row.engines}: {row.reason}",
        )
        for row in table
    )


def _public(value: str) -> str:
    """The value itself, or its digest where it holds a path."""
    if not any(mark in value for mark in "/\\~"):
        return value
    return "a path, sha256:" + hashlib.sha256(value.encode("utf-8", "surrogateescape")).hexdigest()
