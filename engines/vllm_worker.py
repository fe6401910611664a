"""What samebits adds to a vLLM worker: readings from inside, mode `cpu-invariant`, forced tokens for golden replay.

vLLM mixes `WorkerReadings` into its own worker class (`worker_extension_cls`), in whatever process the worker lives,
and calls the methods by name. It does not know the harness. Rules: nothing is changed unless it was asked for; what
was changed can be counted; the engine's own sampler always runs first, on its own random state, and its pick is kept.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from engines import vllm_dummy
from engines.vllm_config import GOLDEN
from engines.vllm_invariance import ordered, padded, tiled

ONE_ROW_PRODUCTS = ("onednn_mm", "weight_packed_linear_cpu")  # of vllm._custom_ops
Scalar = str | int | float | bool


class WorkerReadings:
    """Mixed into vLLM's worker; `self` is the worker."""

    model_runner: Any

    def samebits_pad_single_rows(self) -> None:
        """Computes products of one row with two, the second a copy, and keeps the first."""
        from vllm import _custom_ops as ops

        self._samebits_padded = [0]
        for name in ONE_ROW_PRODUCTS:
            setattr(ops, name, padded(getattr(ops, name), self._samebits_padded, x=_X_PLACE[name]))

    def samebits_order_ties(self) -> None:
        """Reports candidates of equal logprob lowest id first, however many a companion asked for."""
        self._samebits_reordered = [0]
        sampler = self.model_runner.sampler
        sampler.gather_logprobs = ordered(sampler.gather_logprobs, self._samebits_reordered)

    def samebits_fix_tiles(self) -> None:
        """Lets attention see few query tokens at a time, so that its tiles of keys do not follow the batch."""
        from vllm.v1.attention.backends.cpu_attn import CPUAttentionMetadataBuilder

        self._samebits_cut = [0]
        CPUAttentionMetadataBuilder.build = tiled(CPUAttentionMetadataBuilder.build, self._samebits_cut)

    def samebits_force(self) -> None:
        """Lets requests that carry golden tokens emit those, whatever the V1 sampler picked."""
        self._samebits_picks: dict[str, dict[int, int]] = {}
        sampler = self.model_runner.sampler
        sampler.sample = _forcing(sampler.sample, self.model_runner, self._samebits_picks)

    def samebits_take_picks(self) -> dict[str, dict[int, int]]:
        """Request (vLLM's internal id) to position to the sampler's own pick, since the last call."""
        picks = dict(self._samebits_picks)
        self._samebits_picks.clear()
        return picks

    def samebits_observe(self) -> dict[str, Scalar]:
        """What is so in this worker now."""
        import torch

        runner = self.model_runner
        layers = runner.vllm_config.compilation_config.static_forward_context
        backends = {layer.attn_backend.get_name() for layer in layers.values() if hasattr(layer, "attn_backend")}
        caches = {str(cache.dtype) for cache in _tensors(getattr(runner, "kv_caches", []))}
        return {
            "attention_backend": _joined(backends),
            "attention_isa": _joined({str(layer.isa) for layer in layers.values() if hasattr(layer, "isa")}),
            "attention_steps_cut": getattr(self, "_samebits_cut", [0])[0],
            "batch_invariant_kernels": _batch_invariant_kernels(),
            "flash_attention": _joined({str(version) for version in _flash_versions(layers.values())}),
            "dtype": _joined({str(next(runner.get_model().parameters()).dtype)}),
            "kv_cache_dtype": _joined(caches),
            "model_runner": f"{type(runner).__module__}.{type(runner).__name__}",
            "padded_rows": getattr(self, "_samebits_padded", [0])[0],
            "reordered_candidates": getattr(self, "_samebits_reordered", [0])[0],
            "sampler_kernel": _sampler_kernel(runner),
            "threads": torch.get_num_threads(),
        }


_X_PLACE = {"onednn_mm": 1, "weight_packed_linear_cpu": 0}


def _forcing(own: Callable[..., Any], runner: Any, picks: dict[str, dict[int, int]]) -> Callable[..., Any]:  # noqa: ANN401
    """`own`, the V1 sampler's `sample`, with golden tokens in place of its picks. Rows are requests of the batch."""

    def sample(logits: Any, metadata: Any, *rest: Any, **options: Any) -> Any:  # noqa: ANN401 - vLLM's signature
        sampled, processed = own(logits, metadata, *rest, **options)
        for row, request in enumerate(runner.input_batch.req_ids[: len(sampled)]):
            state = runner.requests[request]
            golden = (state.sampling_params.extra_args or {}).get(GOLDEN)
            position = len(state.output_token_ids)
            if golden is not None and position < len(golden):
                picks.setdefault(request, {})[position] = int(sampled[row])
                sampled[row] = golden[position]
        return sampled, processed

    return sample


def _flash_versions(layers: Any) -> list[Any]:  # noqa: ANN401 - vLLM's attention layers
    found = [getattr(getattr(layer, "impl", None), "vllm_flash_attn_version", None) for layer in layers]
    return [version for version in found if version is not None]


def _tensors(caches: Any) -> list[Any]:  # noqa: ANN401 - a tensor, or tensors in lists
    if hasattr(caches, "dtype"):
        return [caches]
    return [tensor for part in caches for tensor in _tensors(part)]


def _joined(names: set[str]) -> str:
    return ", ".join(sorted(names)) or "none"


def _batch_invariant_kernels() -> bool | str:
    """Whether vLLM's batch-invariant kernels have replaced torch's in this process."""
    import importlib

    for module in ("vllm.model_executor.determinism.batch_invariant", "vllm.model_executor.layers.batch_invariant"):
        try:
            return bool(importlib.import_module(module)._batch_invariant_MODE)  # noqa: SLF001 - it has no other name
        except (ImportError, AttributeError):
            continue
    return "unknown"


def _sampler_kernel(runner: Any) -> str:  # noqa: ANN401
    """Who applies top-k and top-p: the method the V1 sampler has settled on, or whether V2's may use FlashInfer."""
    sampler: Any = getattr(runner, "sampler", None)
    if hasattr(sampler, "use_flashinfer"):
        return "flashinfer where no request is greedy or seeded" if sampler.use_flashinfer else "vllm"
    own = getattr(sampler, "topk_topp_sampler", None)
    return getattr(getattr(own, "forward", None), "__name__", "unknown")


vllm_dummy.register()  # vLLM imports this module in every worker process, and nothing else of ours
