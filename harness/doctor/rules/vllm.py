"""vLLM: the batch-invariant mode, and the holes it leaves.

Facts: vLLM 0.26.0 and 0.32.0 read in source; measurements on an H200 (0.26.0) and on CPUs (0.32.0).
"""

from __future__ import annotations

import json
from collections.abc import Iterator

from harness.doctor.engines import has_head_64, name_hardware
from harness.doctor.finding import Hit, Rule, Severity
from harness.doctor.launch import Launch, Scan

MODE = "VLLM_BATCH_INVARIANT"
OLD_MODE = "VLLM_KERNEL_OVERRIDE_BATCH_INVARIANT"
_INVARIANT_BACKENDS = frozenset(
    {"FLASH_ATTN", "TRITON_ATTN", "FLEX_ATTENTION", "FLASH_ATTN_MLA", "TRITON_MLA", "FLASH_ATTN_VLLM_V1"}
)
_UNSUPPORTED_HARDWARE = {
    "sm70": "compute capability 7.0",
    "sm75": "compute capability 7.5",
    "cpu": "a CPU (the first forward pass fails there: no Triton kernels)",
    "tpu": "a TPU",
    "gaudi": "Gaudi",
}
_INVARIANT_QUANTIZATION = frozenset({"awq", "auto_awq", "awq_marlin", "nvfp4", "modelopt_fp4", "modelopt", "humming"})


def _vllm_on(launch: Launch) -> bool:
    return launch.engine == "vllm" and launch.mode_on


def attention_backend(launch: Launch) -> str:
    """The attention backend by option, upper case without prefix; "" when it is left to the engine."""
    given = launch.option("attention_backend", "attention_config.backend")
    nested = launch.option("attention_config")
    if given is None and nested and nested != "?":
        given = _json_text(nested, "backend")
    return (given or "").upper().rsplit(".", 1)[-1]


def _json_text(text: str, key: str) -> str:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return ""
    found = value.get(key) if isinstance(value, dict) else None
    return "" if found is None else str(found)


def find_missing(launch: Launch) -> Iterator[Hit]:
    """vLLM started without the mode."""
    if launch.engine != "vllm" or launch.state(MODE) != "absent" or launch.open or MODE in launch.misspelt:
        return
    if launch.last(OLD_MODE) is not None:
        return  # find_old_name says it, or an early version still reads it
    if any(lost.setting.name == MODE for lost in launch.blocked) or _unset(launch, MODE):
        return
    yield Hit(launch.start.place, f"vLLM is started and nothing that reaches it sets {MODE}", MODE)


def _unset(launch: Launch, name: str) -> bool:
    """Unset after it was set: that is a contradiction, reported where it happens."""
    return any(setting.name == name and setting.unset for setting in launch.settings)


def find_attention(launch: Launch) -> Iterator[Hit]:
    """An attention backend that declares no batch invariance."""
    backend = attention_backend(launch)
    if _vllm_on(launch) and backend not in ("", "?", "AUTO", "NONE") and backend not in _INVARIANT_BACKENDS:
        place = (
            launch.options["attention_backend"].place if "attention_backend" in launch.options else launch.start.place
        )
        yield Hit(place, f"attention backend {backend} does not declare batch invariance", backend)


def find_old_name(scan: Scan) -> Iterator[Hit]:
    """The name the mode had in its first weeks, which recent versions do not read."""
    old = [launch.start.version for launch in scan.launches if not _at_least(launch.start.version, (0, 26))]
    for setting in scan.settings:
        if setting.name == OLD_MODE and not setting.unset and not old:
            yield Hit(setting.place, f"{OLD_MODE} is an old name that vLLM no longer reads; it is {MODE} now", OLD_MODE)


def find_attention_variable(scan: Scan) -> Iterator[Hit]:
    """VLLM_ATTENTION_BACKEND, which recent versions do not read."""
    for launch in scan.launches:
        setting = launch.last("VLLM_ATTENTION_BACKEND")
        if launch.engine == "vllm" and setting is not None and _at_least(launch.start.version, (0, 26)):
            message = "VLLM_ATTENTION_BACKEND is not read by this vLLM; the backend is the engine's own choice"
            yield Hit(setting.place, message, setting.name)


def _at_least(version: str, floor: tuple[int, int]) -> bool:
    """An unknown version counts as a recent one."""
    if not version:
        return True
    parts = version.split(".")
    return (int(parts[0]), int(parts[1])) >= floor


def find_quantization(launch: Launch) -> Iterator[Hit]:
    """A quantisation without invariant kernels."""
    given = (launch.option("quantization") or "").lower()
    if not _vllm_on(launch) or given in ("", "?", "none", "auto") or given in _INVARIANT_QUANTIZATION:
        return
    place = launch.options["quantization"].place
    if "fp8" in given:
        what = "online FP8 takes its activation scale from the whole batch"
    else:
        what = "no kernel for it declares batch invariance and no test covers it"
    yield Hit(place, f"quantization {given}: {what}", given)


def find_hardware(launch: Launch) -> Iterator[Hit]:
    """A platform that the mode does not support."""
    setting = launch.last("VLLM_TARGET_DEVICE")
    hardware = launch.start.hardware or (name_hardware(setting.value) if setting and setting.value else "")
    hardware = name_hardware(hardware) or hardware
    if _vllm_on(launch) and hardware in _UNSUPPORTED_HARDWARE:
        yield Hit(launch.start.place, f"the mode does not run on {_UNSUPPORTED_HARDWARE[hardware]}", hardware)


def find_sampler(launch: Launch) -> Iterator[Hit]:
    """The FlashInfer sampler left on."""
    if not _vllm_on(launch) or _greedy_only(launch):
        return
    if launch.state("VLLM_USE_FLASHINFER_SAMPLER") in ("false", "unknown"):
        return
    if not launch.lacks("logprobs_mode") and launch.option("logprobs_mode") != "raw_logprobs":
        return
    if launch.start.hardware in ("cpu", "rocm"):
        return
    yield Hit(launch.start.place, "top-k/top-p sampling may take FlashInfer's sampler under the mode", "sampler")


def _greedy_only(launch: Launch) -> bool:
    """Every visible request is greedy (and at least one is visible)."""
    fields = [request.fields.get("temperature") for request in launch.requests if not request.bare]
    return bool(fields) and all(
        field is not None and field.kind == "constant" and _is_zero(field.value) for field in fields
    )


def _is_zero(value: str) -> bool:
    try:
        return float(value) == 0.0
    except ValueError:
        return False


def find_autotune(launch: Launch) -> Iterator[Hit]:
    """Autotuners left free to choose other kernels after a restart."""
    if not _vllm_on(launch) or launch.start.hardware == "cpu":
        return
    if not _at_least(launch.start.version, (0, 26)):
        return  # the switches are not there yet
    loose = []
    if launch.state("VLLM_TRITON_FORCE_FIRST_CONFIG") not in ("true", "unknown"):
        loose.append("Triton (VLLM_TRITON_FORCE_FIRST_CONFIG=1 stops it)")
    if not _flashinfer_settled(launch):
        loose.append("FlashInfer (--no-enable-flashinfer-autotune stops it)")
    if loose:
        yield Hit(launch.start.place, f"autotuning stays on under the mode: {', '.join(loose)}", "autotune")


def _flashinfer_settled(launch: Launch) -> bool:
    off = launch.start.options_open or launch.option("no_enable_flashinfer_autotune") is not None
    off = off or launch.option("enable_flashinfer_autotune") in ("false", "?")
    level = launch.option("optimization_level")
    nested = launch.option("kernel_config") or ""
    stored = launch.last("VLLM_FLASHINFER_AUTOTUNE_CACHE_DIR") is not None
    return off or level == "0" or stored or nested == "?" or "enable_flashinfer_autotune" in nested


def find_head_size(launch: Launch) -> Iterator[Hit]:
    """Heads of 64 with FlashAttention 3: known to depend on the batch."""
    if not _vllm_on(launch) or launch.start.hardware not in ("", "sm90"):
        return
    model = launch.option("model", "model_tag") or ""
    if not has_head_64(model) and launch.head_dim != 64:
        return
    if attention_backend(launch) not in ("", "FLASH_ATTN", "AUTO", "NONE"):
        return
    if not attention_backend(launch) and launch.start.options_open:
        return
    if launch.option("attention_config.flash_attn_version") == "2":
        return
    shown = model if has_head_64(model) else "the model beside it"
    yield Hit(launch.start.place, f"{shown} has heads of 64: on Hopper FlashAttention 3 is not invariant there", model)


def find_prefix_cache(launch: Launch) -> Iterator[Hit]:
    """Prefix caching that the mode drops in silence."""
    if not _vllm_on(launch) or attention_backend(launch) not in ("TRITON_MLA", "FLASHINFER"):
        return
    off = not launch.lacks("no_enable_prefix_caching") or launch.option("enable_prefix_caching") == "false"
    if not off:
        backend = attention_backend(launch)
        yield Hit(launch.start.place, f"prefix caching is switched off under the mode with {backend}", backend)


def find_engine_seed(launch: Launch) -> Iterator[Hit]:
    """An engine seed taken for request seeds."""
    if launch.engine != "vllm" or "seed" not in launch.options or launch.option("seed") in ("none", None):
        return
    for request in launch.requests:
        if request.api not in ("vllm", "endpoint") or request.open or request.bare or "seed" in request.fields:
            continue
        field = request.fields.get("temperature")
        if field is None or not (field.kind == "constant" and _is_zero(field.value)):
            place = launch.options["seed"].place
            at = f"{request.place.path}:{request.place.line}"
            yield Hit(place, f"the engine's seed does not stand in for request seeds ({at} has none)", "seed")
            return


_TEST = "VLLM_BATCH_INVARIANT in vLLM 0.26.0 and 0.32.0"

RULES = (
    Rule(
        id="vllm-flag-missing",
        engine="vllm",
        severity=Severity.WARNING,
        title="vLLM without its batch-invariant mode",
        why="Without it a request's bits depend on what else is in the batch: 111 of 1000 completions differed on 8B.",
        mend="Set VLLM_BATCH_INVARIANT=1 before vLLM is imported.",
        facts="measured on an H200 with 0.26.0: one prompt 1000 times at temperature 0",
        launch=find_missing,
    ),
    Rule(
        id="vllm-old-variable",
        engine="vllm",
        severity=Severity.ERROR,
        title="The batch-invariant mode under its first name",
        why="Recent versions ignore the name, so the mode is off.",
        mend="Set VLLM_BATCH_INVARIANT=1 instead.",
        facts="introduced by PR 25603; 0.26.0 and 0.32.0 read VLLM_BATCH_INVARIANT only",
        scan=find_old_name,
    ),
    Rule(
        id="vllm-attention-backend",
        engine="vllm",
        severity=Severity.ERROR,
        title="An attention backend without batch invariance",
        why="The mode covers only backends that declare support; others are refused or break the promise.",
        mend="Use FLASH_ATTN, TRITON_ATTN, FLEX_ATTENTION, FLASH_ATTN_MLA or TRITON_MLA.",
        facts=f"{_TEST}; FlashInfer: flashinfer#2424",
        launch=find_attention,
    ),
    Rule(
        id="vllm-attention-variable",
        engine="vllm",
        severity=Severity.WARNING,
        title="VLLM_ATTENTION_BACKEND, which is no longer read",
        why="The variable is ignored, so another backend than the one named may run.",
        mend="Use --attention-backend, or attention_backend= in Python.",
        facts="not among the variables of 0.26.0 and 0.32.0 (`vllm/envs.py`)",
        scan=find_attention_variable,
    ),
    Rule(
        id="vllm-quantization",
        engine="vllm",
        severity=Severity.WARNING,
        title="A quantisation the mode does not cover",
        why="A scale or a kernel chosen from the whole batch makes each request depend on its companions.",
        mend="Use unquantised weights, AWQ or NVFP4, or show with a matrix that this one holds.",
        facts="vllm#57016 (online FP8 MoE), vllm#9567 (dynamic W8A8); AWQ and NVFP4 are in vLLM's own tests",
        launch=find_quantization,
    ),
    Rule(
        id="vllm-hardware",
        engine="vllm",
        severity=Severity.ERROR,
        title="A platform the mode does not run on",
        why="The mode needs NVIDIA compute capability 8.0 or newer (a ROCm and an XPU branch exist).",
        mend="Choose other hardware, or do not count on the mode here.",
        facts=f"{_TEST}; on a CPU 0.32.0 starts and dies at the first forward pass",
        launch=find_hardware,
    ),
    Rule(
        id="vllm-sampler",
        engine="vllm",
        severity=Severity.WARNING,
        title="FlashInfer's sampler under the batch-invariant mode",
        why="On CUDA the mode leaves FlashInfer's top-k/top-p sampler on; repeats differed at 44 co-resident requests.",
        mend="Set VLLM_USE_FLASHINFER_SAMPLER=0, or use a processed_* logprobs mode.",
        facts="0.32.0 `v1/sample/ops/topk_topp_sampler.py`; vllm#51187",
        launch=find_sampler,
    ),
    Rule(
        id="vllm-autotune",
        engine="vllm",
        severity=Severity.WARNING,
        title="Autotuning under the batch-invariant mode",
        why="The mode does not stop autotuners, and what they choose can change with every restart.",
        mend="Set VLLM_TRITON_FORCE_FIRST_CONFIG=1 and --no-enable-flashinfer-autotune (or keep the tuning cache).",
        facts="0.26.0 and newer; 0.32.0: FlashInfer autotune is on from -O1; vllm#54506, #33279, PR 42425",
        launch=find_autotune,
    ),
    Rule(
        id="vllm-head-size",
        engine="vllm",
        severity=Severity.ERROR,
        title="Heads of 64 with FlashAttention 3 on Hopper",
        why="The kernel's tile follows the longest query of the batch; 32 of 64 requests differed with the mode on.",
        mend="Use --attention-backend TRITON_ATTN.",
        facts="measured on an H200 with 0.26.0; vllm#51902 and #47069 open, flash-attention PR 169",
        launch=find_head_size,
    ),
    Rule(
        id="vllm-prefix-cache",
        engine="vllm",
        severity=Severity.NOTE,
        title="Prefix caching dropped by the mode",
        why="One warning line in the log; capacity and latency are not what the configuration says.",
        mend="Say --no-enable-prefix-caching, or take a backend that keeps it.",
        facts="0.32.0 `model_executor/layers/attention/attention.py`",
        launch=find_prefix_cache,
    ),
    Rule(
        id="vllm-engine-seed",
        engine="vllm",
        severity=Severity.WARNING,
        title="An engine seed in place of request seeds",
        why="All requests draw from one stream in arrival order, so each result depends on the others.",
        mend="Give every sampled request its own seed.",
        facts="V1: the engine seed is 0 by default; temperature above 0 without a seed only warns under the mode",
        launch=find_engine_seed,
    ),
)
