"""SGLang's offline engine as the harness sees it before it runs: settings, modes, axes, models.

It does not import SGLang or torch. Rules: a setting that SGLang resolves to something else (backend, radix cache) is
told as requested here and as resolved by the engine; the server flavour is `engines.http`.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping

from engines import hf_folders
from engines.offline_checks import complete, own_fields
from harness.engine import AxisSupport, Engine, ModelFacts, ModelInfo, Replay, Rule, Scalar, Setting, Tokenizer
from harness.errors import Unsupported

NOT_INSTALLED = (
    "SGLang is not installed here: `pip install sglang` on Linux with a GPU; it does not install on a CPU host. "
    "A server of it elsewhere can be reached with --engine endpoint"
)
NO_GOLDEN = (
    "SGLang has no interface that forces a token and still says what its sampler took: a custom logit processor acts "
    "before the sampler and before the logprobs; use replay = natural"
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
    Setting(name="seeding", default="request", choices=("request", "none"),
            meaning="sampling_seed of each request, or none: SGLang then draws with 42 for everybody"),
    Setting(name="tensor_parallel_size", default=1, minimum=1, meaning="tp_size"),
)  # fmt: skip
_MODES: dict[str, dict[str, Scalar]] = {"deterministic": {"deterministic": True}, "ordinary": {"deterministic": False}}
_CACHES = "cache.*"
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
    "server_history": (),
    "tensor_parallel_size": (),
}
_REFUSED = {
    "cache_restore": "SGLang keeps no radix cache beyond its process without a storage backend, and none is configured",
    "max_num_batched_tokens": "how a prompt was cut is not seen in the streams of the offline engine",
    "num_pages": "retractions are not told per request",
    "samples": "this adapter runs n = 1",
}


class SglangAdapter:
    """The adapter named "sglang"."""

    name = "sglang"

    def settings(self) -> tuple[Setting, ...]:
        """Every option `--set` accepts."""
        return _SETTINGS

    def modes(self) -> Mapping[str, Mapping[str, Scalar]]:
        """deterministic: --enable-deterministic-inference; ordinary: as it comes."""
        return _MODES

    def axes(self) -> Mapping[str, AxisSupport]:
        """Every axis this engine can vary, and those it refuses."""
        offered = {
            name: AxisSupport(fields=(*own_fields(name, _SETTINGS), *fields, _CACHES), resets=name == "cached_prefix")
            for name, fields in _AXES.items()
        }
        return offered | {name: AxisSupport(unsupported=reason) for name, reason in _REFUSED.items()}

    def refuses(self, axis: str, replay: Replay, configuration: Mapping[str, Scalar]) -> str | None:
        """Why a cell cannot be run with these settings, or None."""
        if replay == "golden":
            return NO_GOLDEN
        if axis == "cached_prefix" and not complete(self.name, _SETTINGS, configuration)["prefix_cache"]:
            return "axis 'cached_prefix' needs prefix_cache=true"
        return None

    def strongest_rule(self) -> Rule:
        """Answers carry top candidates, not logits."""
        return "topk"

    def models(self) -> tuple[ModelInfo, ...]:
        """The named models and the kind of path."""
        return hf_folders.list_models()

    def model_facts(self, model: str) -> ModelFacts:
        """Vocabulary and context. Raises ModelError."""
        return hf_folders.model_facts(model)

    def tokenizer(self, model: str) -> Tokenizer:
        """The model's tokenizer. Raises ModelError."""
        return hf_folders.open_tokenizer(model)

    def environment(self, configuration: Mapping[str, Scalar]) -> Mapping[str, str]:
        """No network, and logprobs before temperature, under the names that versions of SGLang gave that switch."""
        complete(self.name, _SETTINGS, configuration)
        return {
            "HF_HUB_OFFLINE": "1",
            "PYTHONHASHSEED": "0",
            "RETURN_ORIGINAL_LOGPROB": "1",
            "SGLANG_RETURN_ORIGINAL_LOGPROB": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }

    def start(self, model: str, configuration: Mapping[str, Scalar]) -> Engine:
        """Starts the engine. Raises EngineError, ModelError, Unsupported."""
        if importlib.util.find_spec("sglang") is None:
            raise Unsupported(NOT_INSTALLED)
        from engines.sglang_lifetime import start_lifetime

        return start_lifetime(hf_folders.open_folder(model), complete(self.name, _SETTINGS, configuration))
