"""The environment variables that decide reproducibility: who reads them, how, and what they should say.

Facts were read in the engines' own sources: vLLM 0.26.0 and 0.32.0 (`envs.py`), SGLang 0.5.23 (`srt/environ.py`),
DeepInfer 0.1.0 (`environ.py`). Nothing here is computed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Reader = Literal["int", "word", "deepinfer", "sglang", "text"]
State = Literal["true", "false", "unknown", "absent", "unreadable"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Variable:
    """A known variable. `want` is the value the promise needs ("" when any fixed value will do)."""

    name: str
    engine: str
    meaning: str
    reader: Reader
    want: str
    modules: tuple[str, ...]  # importing one of these may read the variable
    facts: str


def _vllm(name: str, meaning: str, want: str, facts: str, reader: Reader = "int") -> Variable:
    return Variable(name=name, engine="vllm", meaning=meaning, reader=reader, want=want, modules=("vllm",), facts=facts)


def _deepinfer(name: str, meaning: str, want: str, facts: str) -> Variable:
    return Variable(
        name=name,
        engine="deepinfer",
        meaning=meaning,
        reader="deepinfer",
        want=want,
        modules=("deepinfer",),
        facts=facts,
    )


def _pin(name: str, engine: str, meaning: str, facts: str, want: str = "", reader: Reader = "text") -> Variable:
    return Variable(name=name, engine=engine, meaning=meaning, reader=reader, want=want, modules=(), facts=facts)


_VARIABLES = (
    _vllm(
        "VLLM_BATCH_INVARIANT",
        "batch-invariant mode",
        "1",
        "bool(int(value)) in 0.26.0 and 0.32.0: `true` or `on` is a ValueError at start",
    ),
    _vllm(
        "VLLM_USE_FLASHINFER_SAMPLER",
        "FlashInfer top-k/top-p sampler",
        "0",
        "unset means on; the mode does not switch it off on CUDA (0.32.0)",
    ),
    _vllm(
        "VLLM_TRITON_FORCE_FIRST_CONFIG",
        "first Triton configuration instead of autotuning",
        "1",
        "off by default (0.26.0, 0.32.0); the mode does not switch it on",
        "word",
    ),
    _vllm(
        "VLLM_TP_INVARIANT",
        "tensor-parallel-invariant kernels (TBIK fork)",
        "1",
        "nanomaoli/llm_reproducibility only; needs VLLM_BATCH_INVARIANT too",
    ),
    _deepinfer(
        "DEEPINFER_BATCH_INVARIANT",
        "batch-invariant inference",
        "1",
        "NVIDIA only; the NPU worker asserts that it is off (0.1.0)",
    ),
    _deepinfer(
        "DEEPINFER_ENABLE_MTP_VARLEN",
        "draft length follows confidence",
        "0",
        "deterministic sampling needs it to be 0 (README of 0.1.0)",
    ),
    _pin(
        "DEEPINFER_USE_NEXTN_DECODE",
        "deepinfer",
        "largest draft length",
        "5 by default; 0 turns drafting off; it is a length, not a condition (0.1.0)",
    ),
    _pin(
        "SGLANG_ENABLE_DETERMINISTIC_INFERENCE",
        "sglang",
        "what the server writes from its own flag",
        "overwritten at start from --enable-deterministic-inference (0.5.23)",
        "1",
        "sglang",
    ),
    _pin(
        "SGLANG_DETERMINISTIC_NCCL_NCHANNELS",
        "sglang",
        "NCCL channels under the mode",
        "8 by default; every rank needs the same (0.5.23)",
    ),
    _pin(
        "FORCE_DETERMINISTIC",
        "tensorrt_llm",
        "deterministic kernels (undocumented)",
        "does not reach the workers of trtllm-serve (PR 13290)",
        "1",
        "word",
    ),
    _pin("FD_DETERMINISTIC_MODE", "fastdeploy", "deterministic mode", "FastDeploy PR 6610", "1", "word"),
    _pin("HCCL_DETERMINISTIC", "any", "deterministic collectives on Ascend", "vllm-ascend RFC 5487", "true", "word"),
    _pin(
        "CUBLAS_WORKSPACE_CONFIG", "any", "cuBLAS workspaces", "`:4096:8` or `:16:8`; read at the first cuBLAS handle"
    ),
    _pin("CUBLASLT_WORKSPACE_SIZE", "any", "cuBLASLt workspace (KiB)", "read by torch at the first cuBLASLt call"),
    _pin("NCCL_ALGO", "any", "NCCL algorithm per collective", "read when a communicator is made"),
    _pin("NCCL_PROTO", "any", "NCCL protocol", "read when a communicator is made"),
    _pin("NCCL_MIN_NCHANNELS", "any", "fewest NCCL channels", "read when a communicator is made"),
    _pin("NCCL_MAX_NCHANNELS", "any", "most NCCL channels", "read when a communicator is made"),
    _pin("NCCL_NVLS_ENABLE", "any", "NVLink SHARP reductions", "read when a communicator is made"),
    _pin("PYTHONHASHSEED", "any", "seed of str hashes", "read once, when the interpreter starts"),
)

VARIABLES = {variable.name: variable for variable in _VARIABLES}

# Variables whose setting is part of a promise: how they are set is judged, not only what they say.
FLAGS = tuple(variable.name for variable in _VARIABLES if variable.want)

# Names that exist and lie within a slip of a known one: never called misspelt.
NEIGHBOURS = frozenset({"HCCL_ALGO", "MCCL_ALGO", "RCCL_ALGO", "ACCL_ALGO"})


def read_value(variable: Variable, value: str | None) -> State:
    """What the engine makes of `value`: on, off, unknown to us, or an error at start."""
    if value is None:
        return "unknown"
    if variable.reader == "int":
        return _read_int(value)
    if variable.reader == "deepinfer":
        return "false" if value in ("0", "", "false", "False") else "true"
    if variable.reader == "sglang":
        return _read_words(value, ("true", "1", "yes", "y"), ("false", "0", "no", "n"))
    if variable.reader == "word":
        return "true" if value.strip().lower() in ("1", "true", "strict") else "false"
    return "true" if value else "false"


def _read_int(value: str) -> State:
    text = value.strip()
    digits = text[1:] if text[:1] in ("-", "+") else text
    if not digits.isdecimal() or len(digits) > 40:
        return "unreadable"
    return "true" if int(digits) else "false"


def _read_words(value: str, yes: tuple[str, ...], no: tuple[str, ...]) -> State:
    text = value.lower()
    if text in yes:
        return "true"
    return "false" if text in no else "unreadable"
