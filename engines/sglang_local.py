"""SGLang's offline engine as the harness sees it before it runs: settings, modes, axes, models.

It does not import SGLang or torch. Rules: a setting that SGLang resolves to something else (backend, radix cache) is
told as requested here and as resolved by the engine; the server flavour is `engines.http`.
"""

from __future__ import annotations

from collections.abc import Mapping

from engines import hf_folders
from engines.http.scoring import WHOLE, WITHOUT_FIRST
from engines.offline_adapter import OfflineAdapter
from engines.offline_checks import NEEDS_PATH
from harness.engine import Engine, Replay, Scalar, Setting
from harness.errors import Unsupported
from harness.packages import is_installed

NOT_INSTALLED = (
    "SGLang is not installed here: `pip install sglang` on Linux with a GPU; it does not install on a CPU host. "
    "A server of it elsewhere can be reached with --engine endpoint"
)
NO_GOLDEN = (
    "SGLang has no interface that forces a token and still says what its sampler took: a custom logit processor acts "
    "before the sampler and before the logprobs; with scoring=prefill it reads a path as a prompt, or use "
    "replay = natural"
)
BACKENDS = ("auto", "ascend", "fa3", "fa4", "flashinfer", "torch_native", "triton")
_SETTINGS = (
    Setting(name="attention_backend", default="auto", choices=BACKENDS, meaning="auto: SGLang's choice"),
    Setting(name="deterministic", default=False, choices=(False, True), meaning="enable_deterministic_inference"),
    Setting(name="dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"), meaning="weights"),
    Setting(name="enforce_eager", default=False, choices=(False, True), meaning="disable_cuda_graph"),
    Setting(name="max_model_len", default=0, minimum=0, meaning="context_length; 0: the model's"),
    Setting(name="max_num_batched_tokens", default=0, minimum=-1,
            meaning="chunked_prefill_size; 0: SGLang's choice, -1: prompts whole"),
    Setting(name="max_num_seqs", default=64, minimum=1, meaning="max_running_requests"),
    Setting(name="mem_fraction", default=0.8, minimum=0.0, meaning="mem_fraction_static"),
    Setting(name="page_size", default=0, minimum=0, meaning="tokens per KV page; 0: SGLang's choice"),
    Setting(name="prefix_cache", default=False, choices=(False, True), meaning="radix cache"),
    Setting(name="scored_prompt", default=WHOLE, choices=(WHOLE, WITHOUT_FIRST),
            meaning="what is sent before a path that is read; without-first is a fault, for controls"),
    Setting(name="scoring", default="decode", choices=("decode", "prefill"),
            meaning="logprobs of tokens as they were generated, or of prompt and path read together as a prompt"),
    Setting(name="seeding", default="request", choices=("request", "none"),
            meaning="sampling_seed of each request, or none: SGLang then draws with 42 for everybody"),
    Setting(name="tensor_parallel_size", default=1, minimum=1, meaning="tp_size"),
)  # fmt: skip
_MODES: dict[str, dict[str, Scalar]] = {"deterministic": {"deterministic": True}, "ordinary": {"deterministic": False}}
_AXES: dict[str, tuple[str, ...]] = {
    "arrivals": (),
    "attention_backend": ("resolved.prefix_cache", "resolved.page_size", "resolved.sampling_backend"),
    "batch": (),
    "cached_prefix": (),
    "companions": (),
    "dtype": (),
    "enforce_eager": (),
    "load": (),
    "max_num_seqs": (),
    "order": (),
    "page_size": (),
    "restart": (),
    "scoring": (),
    "server_history": (),
    "tensor_parallel_size": (),
}
_REFUSED = {
    "cache_restore": "SGLang keeps no radix cache beyond its process without a storage backend, and none is configured",
    "max_num_batched_tokens": "how a prompt was cut is not seen in the streams of the offline engine",
    "num_pages": "retractions are not told per request",
    "samples": "this adapter runs n = 1",
}


class SglangAdapter(OfflineAdapter):
    """The adapter named "sglang"; its modes are --enable-deterministic-inference, and SGLang as it comes."""

    name = "sglang"
    options = _SETTINGS
    presets = _MODES
    offered = _AXES
    moved = ("cache.*",)
    refused = _REFUSED
    resets = frozenset({"cached_prefix"})

    def refuses(self, axis: str, replay: Replay, configuration: Mapping[str, Scalar]) -> str | None:
        """Why a cell cannot be run with these settings, or None."""
        if axis == "scoring" and replay != "golden":
            return NEEDS_PATH
        if replay == "golden" and axis != "scoring" and self.complete(configuration)["scoring"] != "prefill":
            return NO_GOLDEN
        if axis == "cached_prefix" and not self.complete(configuration)["prefix_cache"]:
            return "axis 'cached_prefix' needs prefix_cache=true"
        return None

    def variables(self, settings: Mapping[str, Scalar]) -> Mapping[str, str]:  # noqa: ARG002 - the same for all
        """Logprobs before temperature, under the names that versions of SGLang gave that switch."""
        return {"RETURN_ORIGINAL_LOGPROB": "1", "SGLANG_RETURN_ORIGINAL_LOGPROB": "1"}

    def open(self, model: str, settings: Mapping[str, Scalar]) -> Engine:
        """Starts the engine. Raises EngineError, ModelError, Unsupported."""
        if not is_installed("sglang"):
            raise Unsupported(NOT_INSTALLED)
        from engines.sglang_lifetime import start_lifetime

        return start_lifetime(hf_folders.open_folder(model), settings)
