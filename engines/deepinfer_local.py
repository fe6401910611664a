"""DeepInfer 0.1.0 as the harness sees it before it runs: settings, modes, axes, models.

It does not import DeepInfer or torch. Rules: DeepInfer's contract needs three conditions together, each a setting here,
so that a cell can take it away; hardware and package are looked at in the child, and the refusal says what is missing.
"""

from __future__ import annotations

from collections.abc import Mapping

from engines import hf_folders
from engines.offline_adapter import OfflineAdapter
from harness.engine import Engine, ModelInfo, Scalar, Setting

_SETTINGS = (
    Setting(name="async_scheduling", default=True, choices=(False, True),
            meaning="DEEPINFER_ZERO_OVERHEAD_SCHEDULING: schedule the next step while one runs"),
    Setting(name="batch_invariant", default=True, choices=(False, True),
            meaning="DEEPINFER_BATCH_INVARIANT, the first condition; NVIDIA alone"),
    Setting(name="chunked_prefill", default=False, choices=(False, True), meaning="chunked_prefill of LLM"),
    Setting(name="draft_length", default=5, minimum=0, meaning="DEEPINFER_USE_NEXTN_DECODE: proposals of MTP; 0: none"),
    Setting(name="expert_parallel_size", default=1, minimum=1, meaning="expert_parallel_size of LLM"),
    Setting(name="gpu_memory_utilization", default=0.9, minimum=0.0, meaning="share of GPU memory"),
    Setting(name="keep_tokens", default=140, minimum=0,
            meaning="DEEPINFER_YOCO_PREFILL_KEEP_TOKENS: prompt tokens that a truncated prefill replays"),
    Setting(name="max_num_batched_tokens", default=0, minimum=0, meaning="tokens in one step; 0: DeepInfer's choice"),
    Setting(name="max_num_seqs", default=64, minimum=1, meaning="sequences in one step"),
    Setting(name="mtp_varlen", default=False, choices=(False, True),
            meaning="DEEPINFER_ENABLE_MTP_VARLEN: as many proposals as confidence allows; off is the second condition"),
    Setting(name="prefill_replay", default="off", choices=("off", "mask", "compact"),
            meaning="DEEPINFER_YOCO_PREFILL_TRUNCATION_MODE: approximate replay of a sliding window"),
    Setting(name="seeding", default="request", choices=("request", "none"),
            meaning="a fixed seq_seed per request, the third condition; none: DeepInfer draws 64 random bits"),
)  # fmt: skip
_MODES: dict[str, dict[str, Scalar]] = {
    "deterministic": {"batch_invariant": True, "mtp_varlen": False, "seeding": "request"},
    "ordinary": {"batch_invariant": False, "mtp_varlen": False, "seeding": "none"},
    "seeds-alone": {"batch_invariant": False, "mtp_varlen": False, "seeding": "request"},
}
KEEP_TOKENS = "DEEPINFER_YOCO_PREFILL_KEEP_TOKENS"
VARIABLES = {  # setting to the variable that carries it
    "async_scheduling": "DEEPINFER_ZERO_OVERHEAD_SCHEDULING",
    "batch_invariant": "DEEPINFER_BATCH_INVARIANT",
    "draft_length": "DEEPINFER_USE_NEXTN_DECODE",
    "keep_tokens": KEEP_TOKENS,
    "mtp_varlen": "DEEPINFER_ENABLE_MTP_VARLEN",
    "prefill_replay": "DEEPINFER_YOCO_PREFILL_TRUNCATION_MODE",
}
_OFFERED: dict[str, tuple[str, ...]] = {
    axis: (f"env.{VARIABLES[axis]}",) if axis in VARIABLES else ()
    for axis in (
        "async_scheduling", "batch", "chunked_prefill", "companions", "draft_length", "expert_parallel_size",
        "max_num_seqs", "order", "prefill_replay", "restart", "server_history",
    )
}  # fmt: skip
_OFFERED["prefill_replay"] += (f"env.{KEEP_TOKENS}",)
_REFUSED = {
    "arrivals": "LLM.generate takes its requests at once; nobody joins a batch that runs",
    "load": "LLM.generate takes its requests at once; there is no load over time to vary",
    "cached_prefix": "the open release has no prefix cache between requests",
    "cache_restore": "the open release has no KV cache store",
    "max_num_batched_tokens": "how a prompt was cut is not seen from outside; use the axis chunked_prefill",
    "num_pages": "preemptions are not seen from outside",
    "samples": "LLM.generate gives one sample per request",
    "tensor_parallel_size": "DeepInfer shares experts and context, not layers",
}


class DeepInferAdapter(OfflineAdapter):
    """The adapter named "deepinfer".

    Its modes are deterministic (the three conditions of its README), ordinary (as it comes), seeds-alone (fixed seeds).
    """

    name = "deepinfer"
    options = _SETTINGS
    presets = _MODES
    offered = _OFFERED
    refused = _REFUSED

    def models(self) -> tuple[ModelInfo, ...]:
        """A folder."""
        return (ModelInfo(name="FOLDER", description="the folder of DeepSeek-V4.1-Flash, the one model it supports",
                          available=True, how_to_get="give its path"),)  # fmt: skip

    def variables(self, settings: Mapping[str, Scalar]) -> Mapping[str, str]:
        """DeepInfer's variables, which must be there before its first import."""
        carried = {variable: _text(settings[setting]) for setting, variable in VARIABLES.items()}
        if settings["prefill_replay"] == "off":
            del carried[KEEP_TOKENS]
        return carried

    def open(self, model: str, settings: Mapping[str, Scalar]) -> Engine:
        """Starts the engine. Raises EngineError, ModelError, Unsupported."""
        from engines.deepinfer_lifetime import start_lifetime

        return start_lifetime(hf_folders.open_folder(model), settings)


def _text(value: Scalar) -> str:
    return str(int(value)) if isinstance(value, bool) else str(value)
