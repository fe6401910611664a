"""Opens bfloat16 arithmetics: device, weights, the self-tests, then graphs.

It does not compute. Rules: what this machine lacks is said before weights are loaded; `tensorcore` is handed out only
after its self-tests; `free` and `native` are controls and have none.
"""

from __future__ import annotations

import torch

from engines.bundled.config import EngineConfig, Model, ModelConfig
from engines.bundled.errors import NotSupported
from engines.bundled.gpu.tensorcore.decode import DecodeGraphs
from engines.bundled.gpu.tensorcore.forward import TensorCoreArithmetic
from engines.bundled.gpu.tensorcore.operators import Rows
from engines.bundled.gpu.tensorcore.passes import run_pass
from engines.bundled.gpu.tensorcore.prefill import PIECES, PrefillGraphs, padded_tokens
from engines.bundled.gpu.tensorcore.selfcheck import check_forms, check_reports
from engines.bundled.gpu.tensorcore.selftest import choose_linear, choose_tree
from engines.bundled.gpu.tensorcore.weights import Source, check_family, open_weights
from engines.bundled.kernels.library import load

NAMES = ("tensorcore", "free", "native")
OLDEST = (8, 0)


def open_model(model: Model, config: EngineConfig, index: int) -> TensorCoreArithmetic:
    """Of a model's own weights; see `open_source`."""
    device = check_device(index)
    return open_source(model.config, config, open_weights(model, device), device)


def open_source(model: ModelConfig, config: EngineConfig, source: Source, device: str) -> TensorCoreArithmetic:
    """Weights from `source` on `device`, checked and ready.

    Raises:
        NotSupported: no such GPU, an old one, no Triton, a model these kernels are not for, or a failed self-check.
        GpuMemoryError: weights and KV pages do not fit.
        ValueError: an arithmetic that is none of NAMES, or a weight that is missing.
    """
    if config.arithmetic not in NAMES:
        raise ValueError(f"arithmetic: expected one of {', '.join(NAMES)} in bfloat16, got {config.arithmetic!r}")
    check_family(model, config)
    with torch.inference_mode():
        arithmetic = TensorCoreArithmetic(model, config, source, load(config.isa, config.compiler), device)
        compared = 0
        if config.arithmetic == "tensorcore":
            torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
            most = padded_tokens(config.max_num_batched_tokens)
            arithmetic.linear, arithmetic.facts = choose_linear(arithmetic.weights, tokens=most, seats=PIECES[-1])
            if arithmetic.tree is not None:
                arithmetic.tree, facts = choose_tree(arithmetic.tree.chunks, arithmetic.weights, most)
                arithmetic.facts |= facts
            compared = check_forms(arithmetic)
        arithmetic.facts |= device_facts(device)
        if config.arithmetic != "native":
            check_reports(arithmetic)

        def run(rows: Rows, wanted: torch.Tensor | None, longest: int) -> torch.Tensor:
            return run_pass(arithmetic.weights, arithmetic.caches, arithmetic.operators(longest), rows, wanted)

        def keys_of(longest: int) -> int:
            return arithmetic.operators(longest).heads.keys

        if config.enforce_eager:
            return _checked(arithmetic, compared)
        seats, pitch = config.max_num_seqs, arithmetic.pitch
        arithmetic.graphs = DecodeGraphs(run, keys_of, seats, pitch, device)
        if config.arithmetic != "native":
            arithmetic.prefills = PrefillGraphs(run, lambda longest: arithmetic.operators(longest).heads, pitch, device)
        if config.arithmetic == "tensorcore":
            compared += check_forms(arithmetic)  # once more by recorded steps
    return _checked(arithmetic, compared)


def _checked(arithmetic: TensorCoreArithmetic, compared: int) -> TensorCoreArithmetic:
    if compared:
        arithmetic.facts["gpu_forms_test"] = f"equal in {compared} logits"
    arithmetic.steps = arithmetic.graph_steps = 0
    return arithmetic


def check_device(index: int) -> str:
    """torch's name of the device. Raises NotSupported."""
    if index >= torch.cuda.device_count():
        raise NotSupported(
            f"dtype=bfloat16 on device=cuda:{index}: torch {torch.__version__} sees {torch.cuda.device_count()} GPUs"
        )
    capability = torch.cuda.get_device_capability(index)
    if capability < OLDEST:
        found = ".".join(map(str, capability))
        raise NotSupported(f"dtype=bfloat16: the GPU has compute capability {found}; 8.0 or newer is needed")
    return f"cuda:{index}"


def device_facts(device: str) -> dict[str, str | int | float | bool]:
    """Card and software that the bits depend on."""
    import triton

    capability = torch.cuda.get_device_capability(device)
    return {
        "gpu": torch.cuda.get_device_name(device),
        "gpu_capability": ".".join(map(str, capability)),
        "gpu_cuda": str(torch.version.cuda),
        "gpu_compiler": f"Triton {triton.__version__}",
        "gpu_multiprocessors": torch.cuda.get_device_properties(device).multi_processor_count,
        "gpu_torch": torch.__version__,
    }
