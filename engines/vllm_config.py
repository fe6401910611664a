"""From samebits' settings to vLLM's: engine arguments, environment variables, thread binding.

It does not import vLLM. Rules: what can be an engine argument is one; a variable is used only where vLLM offers nothing
else; nothing is left to a default that depends on free memory or on `generation_config.json`.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from typing import cast

from engines.vllm_models import ServedModel
from harness.engine import Scalar, Setting
from harness.errors import Unsupported

MOST_THREADS = 8  # more share one small model's step at a loss
MOST_LOGPROBS = 20
RANDOM_WEIGHTS = "samebits-normal"  # load format that engines/vllm_dummy.py registers
GOLDEN = "samebits_golden"  # key of SamplingParams.extra_args: the token ids to emit
EXTENSION = "engines.vllm_worker.WorkerReadings"
GIB = 1 << 30
CACHE_VARIABLES = ("VLLM_CACHE_ROOT", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
BACKENDS = ("auto", "CPU_ATTN", "FLASH_ATTN", "FLASHINFER", "FLEX_ATTENTION", "TRITON_ATTN")
FORCINGS = ("auto", "sampler", "trace", "none")


def settings() -> tuple[Setting, ...]:
    """Every option `--set` accepts. A name that vLLM has is used as vLLM uses it, `page_size` and `draft` apart."""
    return (
        Setting(name="async_scheduling", default=False, choices=(False, True),
                meaning="schedule the next step while one runs; vLLM turns it off on CPUs"),
        Setting(name="attention_backend", default="auto", choices=BACKENDS, meaning="vLLM's attention kernels"),
        Setting(name="batch_invariant", default=False, choices=(False, True), meaning="VLLM_BATCH_INVARIANT"),
        Setting(name="compile_helpers", default=False, choices=(False, True),
                meaning="with enforce_eager: torch.compile for vLLM's small helpers (ranks of logprobs, a mask)"),
        Setting(name="data_parallel_size", default=1, minimum=1, meaning="replicas of the model; 1 alone is offered"),
        Setting(name="draft", default="off", choices=("off", "ngram"),
                meaning="who proposes tokens ahead: nobody, or the text so far (vLLM's ngram method)"),
        Setting(name="draft_length", default=4, minimum=1, meaning="proposals verified in one step, at most"),
        Setting(name="dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"),
                meaning="weights and activations"),
        Setting(name="enable_expert_parallel", default=False, choices=(False, True),
                meaning="experts, not slices of experts, are spread over ranks; needs a mixture of experts"),
        Setting(name="enforce_eager", default=True, choices=(False, True),
                meaning="no compiled graphs, no CUDA graphs"),
        Setting(name="executor", default="auto", choices=("auto", "uni", "mp"),
                meaning="workers in the engine's process or in processes of their own; auto: uni for one rank"),
        Setting(name="fixed_tiles", default=False, choices=(False, True),
                meaning="CPU: attention takes few query tokens at a time, so that its tiles of keys keep one size"),
        Setting(name="forcing", default="auto", choices=FORCINGS,
                meaning="how golden replay forces tokens: at the V1 sampler, by native trace replay, or not at all"),
        Setting(name="gpu_memory_utilization", default=0.85, minimum=0.0, meaning="share of GPU memory vLLM may use"),
        Setting(name="kernel_caches", default="fresh", choices=("fresh", "kept"),
                meaning="compile and autotune caches: empty ones that go with the process, or the user's own"),
        Setting(name="kv_cache_dtype", default="auto", choices=("auto", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2"),
                meaning="keys and values in the cache; auto: as dtype"),
        Setting(name="kv_cache_gib", default=1, minimum=1,
                meaning="GiB for keys and values per rank: fixed, so that free memory cannot move the page count"),
        Setting(name="max_model_len", default=2048, minimum=0, meaning="tokens of prompt and output; 0: the model's"),
        Setting(name="max_num_batched_tokens", default=4096, minimum=1,
                meaning="tokens in one step; a longer prompt is prefilled in chunks"),
        Setting(name="max_num_seqs", default=16, minimum=1, meaning="sequences in one step"),
        Setting(name="model_runner", default="auto", choices=("auto", "v1", "v2"), meaning="VLLM_USE_V2_MODEL_RUNNER"),
        Setting(name="num_pages", default=0, minimum=0, meaning="KV blocks in the pool; 0: what kv_cache_gib holds"),
        Setting(name="order_ties", default=False, choices=(False, True),
                meaning="candidates of equal logprob lowest id first, however many a companion asks for (V1 sampler)"),
        Setting(name="pad_single_rows", default=False, choices=(False, True),
                meaning="CPU: a product with one row is computed with two, so that it takes the same kernel"),
        Setting(name="page_size", default=0, minimum=0,
                meaning="tokens per KV block (vLLM's block_size); 0: vLLM's choice"),
        Setting(name="pipeline_parallel_size", default=1, minimum=1, meaning="stages of layers"),
        Setting(name="policy", default="fcfs", choices=("fcfs", "priority"), meaning="who runs first"),
        Setting(name="prefix_cache", default=False, choices=(False, True), meaning="vLLM's enable_prefix_caching"),
        Setting(name="split_kv", default=True, choices=(False, True),
                meaning="CPU: attention splits keys among threads (VLLM_CPU_ATTN_SPLIT_KV)"),
        Setting(name="tensor_parallel_size", default=1, minimum=1, meaning="ranks that share each layer"),
        Setting(name="threads", default=default_threads(), minimum=1, meaning="threads of each rank, bound to cores"),
    )  # fmt: skip


def engine_arguments(model: ServedModel, values: Mapping[str, Scalar]) -> dict[str, object]:
    """Keyword arguments of `vllm.EngineArgs`. Raises Unsupported for what this adapter cannot run."""
    refuse_unsupported(values)
    ranks = rank_count(values)
    arguments: dict[str, object] = {
        "model": str(model.folder),
        "skip_tokenizer_init": model.tokenizer is None,
        "load_format": "auto" if model.weights == "files" else RANDOM_WEIGHTS,
        "generation_config": "vllm",  # sampling fields come from the request alone
        "seed": 0,
        "max_logprobs": MOST_LOGPROBS,
        "logprobs_mode": "raw_logprobs",
        "enable_chunked_prefill": True,
        "enable_prefix_caching": values["prefix_cache"],
        "kv_cache_memory_bytes": cast("int", values["kv_cache_gib"]) * GIB,
        "scheduling_policy": values["policy"],
        "distributed_executor_backend": executor_of(values, ranks),
        "worker_extension_cls": EXTENSION,
        "disable_log_stats": True,
        **{name: values[name] for name in (
            "async_scheduling", "dtype", "enable_expert_parallel", "enforce_eager", "gpu_memory_utilization",
            "kv_cache_dtype", "max_num_batched_tokens", "max_num_seqs", "pipeline_parallel_size",
            "tensor_parallel_size",
        )},
    }  # fmt: skip
    optional = {"page_size": "block_size", "max_model_len": "max_model_len", "num_pages": "num_gpu_blocks_override"}
    arguments |= {name: values[key] for key, name in optional.items() if values[key]}
    if values["attention_backend"] != "auto":
        arguments["attention_backend"] = values["attention_backend"]
    if values["draft"] == "ngram":
        arguments["speculative_config"] = {
            "method": "ngram", "num_speculative_tokens": values["draft_length"],
            "prompt_lookup_max": 4, "prompt_lookup_min": 2,
        }  # fmt: skip
    if values["forcing"] == "trace":
        arguments["enable_trace_replay"] = True
    return arguments


def refuse_unsupported(values: Mapping[str, Scalar]) -> None:
    """Raises Unsupported, with the reason, for settings that cannot be run here whatever the build."""
    if values["data_parallel_size"] != 1:
        raise Unsupported("data_parallel_size: vLLM's engine in one process runs one replica; replicas need its server")
    if values["pad_single_rows"] and not values["enforce_eager"]:
        raise Unsupported(
            "pad_single_rows wraps functions that a compiled graph has taken in before; use enforce_eager=true"
        )
    if rank_count(values) > 1 and values["executor"] == "uni":
        raise Unsupported(f"executor=uni runs one rank, {rank_count(values)} are configured; use executor=mp or auto")
    cores, needed = len(_cores()), rank_count(values) * cast("int", values["threads"])
    if needed > cores:
        ranks = rank_count(values)
        raise Unsupported(
            f"{ranks} rank(s) of {values['threads']} thread(s) need {needed} cores, {cores} are usable; "
            f"lower threads to {cores // ranks} or less"
            if cores >= ranks
            else f"{ranks} ranks need a core each, {cores} are usable"
        )


def environment(values: Mapping[str, Scalar]) -> dict[str, str]:
    """Variables of the engine's process, set before anything is imported there."""
    threads = str(values["threads"])
    runner = {"v1": "0", "v2": "1"}.get(str(values["model_runner"]))
    return {
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "MKL_NUM_THREADS": threads,
        "OMP_DYNAMIC": "FALSE",
        "OMP_NUM_THREADS": threads,
        "OMP_WAIT_POLICY": "PASSIVE",  # spinning threads collapse throughput on shared cores
        "PYTHONHASHSEED": "0",
        "TOKENIZERS_PARALLELISM": "false",
        "TRANSFORMERS_OFFLINE": "1",
        "VLLM_BATCH_INVARIANT": str(int(cast("bool", values["batch_invariant"]))),
        "VLLM_CPU_ATTN_SPLIT_KV": str(int(cast("bool", values["split_kv"]))),
        "VLLM_CPU_OMP_THREADS_BIND": thread_binding(rank_count(values), cast("int", values["threads"])),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the scheduler stays in our process, where its steps are read
        "VLLM_NO_USAGE_STATS": "1",
        **({"TORCHDYNAMO_DISABLE": "1"} if values["enforce_eager"] and not values["compile_helpers"] else {}),
        **({"VLLM_USE_V2_MODEL_RUNNER": runner} if runner else {}),
        **({} if importlib.util.find_spec("flashinfer") else {"VLLM_USE_FLASHINFER_SAMPLER": "0"}),  # 1 imports it
    }


def thread_binding(ranks: int, threads: int) -> str:
    """Cores of each rank as VLLM_CPU_OMP_THREADS_BIND wants them, for example "0,1|2,3"; too few cores: "nobind"."""
    cores = _cores()
    if ranks * threads > len(cores):
        return "nobind"  # the start is refused with the reason
    groups = [cores[rank * threads : (rank + 1) * threads] for rank in range(ranks)]
    return "|".join(",".join(map(str, group)) for group in groups)


def rank_count(values: Mapping[str, Scalar]) -> int:
    """Worker processes, or parts of the model, in one replica."""
    return cast("int", values["tensor_parallel_size"]) * cast("int", values["pipeline_parallel_size"])


def executor_of(values: Mapping[str, Scalar], ranks: int) -> str:
    """vLLM's name for where its workers live."""
    chosen = str(values["executor"])
    if chosen != "auto":
        return chosen
    return "uni" if ranks == 1 else "mp"


def default_threads() -> int:
    """Threads of one rank on this machine."""
    return min(len(_cores()), MOST_THREADS)


def _cores() -> list[int]:
    return sorted(os.sched_getaffinity(0))
