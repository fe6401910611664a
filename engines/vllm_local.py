"""vLLM in a process of ours, as the harness sees it before it runs: settings, modes, axes, models.

It does not import vLLM, torch or numpy. Rules: an axis names all fingerprint fields that move with it, and what a
build cannot do is refused with the reason; the engine itself is started by `engines.vllm_lifetime`, in the child.
"""

from __future__ import annotations

from collections.abc import Mapping

from engines import vllm_config, vllm_models
from engines.offline_adapter import offer_axes
from engines.offline_checks import complete
from harness.engine import AxisSupport, Engine, ModelFacts, ModelInfo, Rule, Scalar, Setting, Tokenizer
from harness.errors import Unsupported
from harness.packages import is_installed

NOT_INSTALLED = (
    "vLLM is not installed here: `make vllm` installs its CPU build beside the CPU build of PyTorch, "
    "`pip install samebits[vllm]` the one for GPUs"
)
_PLAIN: dict[str, Scalar] = {
    "batch_invariant": False, "fixed_tiles": False, "order_ties": False, "pad_single_rows": False, "split_kv": True,
}  # fmt: skip
_MODES: dict[str, dict[str, Scalar]] = {
    "ordinary": _PLAIN,
    "deterministic": {**_PLAIN, "batch_invariant": True},
    "cpu-invariant": {
        "batch_invariant": False, "fixed_tiles": True, "order_ties": True, "pad_single_rows": True, "split_kv": False,
    },
}  # fmt: skip
_CACHES = "cache.*"  # they grow while an engine runs; what they held at the start is resolved.caches_at_start
_RANK_FIELDS = ("resolved.executor", "resolved.num_pages", "env.VLLM_CPU_OMP_THREADS_BIND")
_GRAPH_FIELDS = ("resolved.compile_mode", "resolved.graph_mode", "resolved.graph_sizes", "resolved.custom_ops")
_AXES: dict[str, tuple[str, ...]] = {
    "batch": (),
    "companions": (),
    "load": (),
    "order": (),
    "arrivals": (),
    "restart": (),
    "server_history": (),
    "cached_prefix": (),
    "max_num_seqs": ("resolved.graph_sizes", "resolved.num_pages"),
    "max_num_batched_tokens": ("resolved.graph_sizes", "resolved.num_pages"),
    "page_size": ("resolved.num_pages",),
    "num_pages": (),
    "policy": (),
    "async_scheduling": (),
    "enforce_eager": _GRAPH_FIELDS,
    "attention_backend": ("resolved.page_size", "resolved.num_pages", "resolved.prefix_cache", *_GRAPH_FIELDS),
    "dtype": ("resolved.kv_cache_dtype", "resolved.num_pages"),
    "kv_cache_dtype": ("resolved.num_pages", "resolved.attention_backend"),
    "draft": ("resolved.forcing", "resolved.model_runner", *_GRAPH_FIELDS),
    "threads": ("env.OMP_NUM_THREADS", "env.MKL_NUM_THREADS", "env.VLLM_CPU_OMP_THREADS_BIND"),
    "tensor_parallel_size": _RANK_FIELDS,
    "pipeline_parallel_size": _RANK_FIELDS,
    "enable_expert_parallel": (),
    "kernel_caches": ("resolved.caches_at_start",),
}
_REFUSED = {
    "data_parallel_size": "vLLM's engine in one process runs one replica; replicas need its server",
    "cache_restore": "vLLM keeps no prefix cache beyond its process without a KV connector, and none is configured",
    "samples": "this adapter runs n = 1; vLLM derives the seeds of further samples from the request's",
}


class VllmAdapter:
    """The adapter named "vllm"."""

    name = "vllm"

    def settings(self) -> tuple[Setting, ...]:
        """Every option `--set` accepts."""
        return vllm_config.settings()

    def modes(self) -> Mapping[str, Mapping[str, Scalar]]:
        """ordinary: vLLM as it comes; deterministic: its own flag, for GPUs; cpu-invariant: measured so on CPUs."""
        return _MODES

    def axes(self) -> Mapping[str, AxisSupport]:
        """Every axis this engine can vary, and those it refuses."""
        return offer_axes(
            dict(sorted(_AXES.items())), dict(sorted(_REFUSED.items())), vllm_config.settings(), (_CACHES,),
            ("cached_prefix",),
        )  # fmt: skip

    def strongest_rule(self) -> Rule:
        """vLLM reports top candidates, not logits."""
        return "topk"

    def models(self) -> tuple[ModelInfo, ...]:
        """The named models and the kind of path."""
        return vllm_models.list_models()

    def model_facts(self, model: str) -> ModelFacts:
        """Vocabulary and context. Raises ModelError."""
        return vllm_models.model_facts(model)

    def tokenizer(self, model: str) -> Tokenizer:
        """The model's tokenizer. Raises ModelError."""
        return vllm_models.open_tokenizer(model)

    def environment(self, configuration: Mapping[str, Scalar]) -> Mapping[str, str]:
        """Flags, thread binding, and no telephone calls."""
        return vllm_config.environment(self._complete(configuration))

    def start(self, model: str, configuration: Mapping[str, Scalar]) -> Engine:
        """Starts the engine. Raises EngineError, ModelError, Unsupported."""
        if not is_installed("vllm"):
            raise Unsupported(NOT_INSTALLED)
        from engines.vllm_lifetime import start_lifetime

        return start_lifetime(vllm_models.open_model(model), self._complete(configuration))

    def _complete(self, configuration: Mapping[str, Scalar]) -> dict[str, Scalar]:
        return complete(self.name, self.settings(), configuration)
