"""The closed list of axes: what may be varied, where a difference belongs, and what proves that it varied.

It does not know any engine. Rules: an axis is either a schedule, a setting of the engine, the process itself, what it
served before, or the environment since a baseline; each names its home layer, its floor and its witness; the
fingerprint fields an engine moves with it come from the adapter, those of an environment axis stand here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Layer = Literal["sampling", "forward", "parallelism", "environment"]
AxisKind = Literal["schedule", "setting", "process", "history", "environment"]
FloorPlace = Literal["same lifetime", "fresh lifetimes"]
WitnessKind = Literal["beside", "composition", "chunks", "cached", "preempted", "samples", "drafts", "rollbacks", "all"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """One controlled variable.

    `evidence` names the observed field that must differ between the arms when the witness is "all" (the axis acts on
    the whole process), `also` further ones that must differ too; "process nonce" stands for two different processes,
    and "lineage" for a variant that served something before. `fields` are the fingerprint fields of an environment
    axis: one of them must have changed since the baseline, or nothing was put to the test.
    """

    name: str
    kind: AxisKind
    home: Layer
    witness: WitnessKind
    meaning: str
    floor: FloorPlace = "same lifetime"
    evidence: str | None = None
    also: tuple[str, ...] = ()
    fields: tuple[str, ...] = ()


_LIST = (
    Axis(name="batch", kind="schedule", home="forward", witness="beside",
         meaning="one request at a time, or all of them together, arrivals staggered by steps"),
    Axis(name="companions", kind="schedule", home="forward", witness="composition",
         meaning="which other requests run beside the judged ones: none, or CORPUS:COUNT"),
    Axis(name="load", kind="schedule", home="forward", witness="composition",
         meaning="the background traffic the judged requests run in: none, SHAPE:SEED, or one that was written down"),
    Axis(name="order", kind="schedule", home="forward", witness="composition",
         meaning="the order in which requests arrive"),
    Axis(name="arrivals", kind="schedule", home="forward", witness="beside",
         meaning="requests arrive alone, or while others are decoding"),
    Axis(name="max_num_seqs", kind="setting", home="forward", witness="beside",
         meaning="how many sequences may run in one step"),
    Axis(name="max_num_batched_tokens", kind="setting", home="forward", witness="chunks",
         meaning="tokens in one step; longer prompts are prefilled in chunks"),
    Axis(name="chunked_prefill", kind="setting", home="forward", witness="all", evidence="chunked_prefill",
         meaning="prompts whole, or in chunks that an engine does not show"),
    Axis(name="prefill_replay", kind="setting", home="forward", witness="all", evidence="prefill_replay",
         meaning="all of a prompt, or its last tokens alone where a sliding window makes do with them"),
    Axis(name="padding", kind="setting", home="forward", witness="all", evidence="padding",
         meaning="masked tokens to the left of each row of a static batch"),
    Axis(name="page_size", kind="setting", home="forward", witness="all", evidence="page_size",
         meaning="tokens per KV-cache page"),
    Axis(name="threads", kind="setting", home="parallelism", witness="all", evidence="threads",
         meaning="threads that share one step"),
    Axis(name="tensor_parallel_size", kind="setting", home="parallelism", witness="all", evidence="ranks",
         meaning="ranks that share each layer"),
    Axis(name="dtype", kind="setting", home="forward", witness="all", evidence="dtype",
         meaning="the type of weights and activations"),
    Axis(name="kv_cache_dtype", kind="setting", home="forward", witness="all", evidence="kv_cache_dtype",
         meaning="the type of keys and values in the cache"),
    Axis(name="enforce_eager", kind="setting", home="forward", witness="all", evidence="execution",
         meaning="compiled graphs and CUDA graphs, or one kernel after another"),
    Axis(name="attention_backend", kind="setting", home="forward", witness="all", evidence="attention_backend",
         meaning="the attention kernels that were asked for"),
    Axis(name="pipeline_parallel_size", kind="setting", home="parallelism", witness="all", evidence="ranks",
         meaning="stages that hold a part of the layers each"),
    Axis(name="data_parallel_size", kind="setting", home="parallelism", witness="all", evidence="ranks",
         meaning="replicas that share the requests"),
    Axis(name="disaggregated", kind="setting", home="parallelism", witness="cached",
         meaning="prompts are computed where they are decoded, or in another process that hands them over"),
    Axis(name="expert_parallel_size", kind="setting", home="parallelism", witness="all", evidence="ranks",
         meaning="ranks that share the experts of a mixture"),
    Axis(name="enable_expert_parallel", kind="setting", home="parallelism", witness="all",
         evidence="enable_expert_parallel", meaning="ranks hold whole experts, or a slice of each"),
    Axis(name="kernel_caches", kind="setting", home="environment", witness="all", evidence="caches_at_start",
         meaning="compile and autotune caches that are empty, or hold what earlier processes left"),
    Axis(name="restart", kind="process", home="environment", witness="all", evidence="process nonce",
         meaning="the same engine process, or a new one"),
    Axis(name="cached_prefix", kind="history", home="forward", witness="cached", floor="fresh lifetimes",
         meaning="how much of a prompt the prefix cache holds, and who left it there"),
    Axis(name="server_history", kind="history", home="forward", witness="all", floor="fresh lifetimes",
         evidence="lineage", meaning="what the engine has served before: nothing, or CORPUS:COUNT"),
    Axis(name="cache_restore", kind="history", home="forward", witness="cached", floor="fresh lifetimes",
         meaning="an empty prefix cache, or one that another process saved to disk"),
    Axis(name="num_pages", kind="setting", home="forward", witness="preempted",
         meaning="KV-cache pages in the pool; too few for all requests force preemption"),
    Axis(name="policy", kind="setting", home="forward", witness="composition",
         meaning="who runs first and who gives pages back: first come, priority or length"),
    Axis(name="priority_preempts", kind="setting", home="forward", witness="preempted",
         meaning="whether one that runs gives way to a more urgent one that waits"),
    Axis(name="async_scheduling", kind="setting", home="forward", witness="all", evidence="steps_scheduled_ahead",
         meaning="whether the next step is scheduled while one runs"),
    Axis(name="samples", kind="setting", home="sampling", witness="samples",
         meaning="the n samples of a request as requests of their own, one after another, or together"),
    Axis(name="observer", kind="setting", home="sampling", witness="all", evidence="logprobs_computed",
         meaning="whether anybody asks for logprobs"),
    Axis(name="draft", kind="setting", home="forward", witness="drafts",
         meaning="who proposes tokens ahead: nobody, the text so far, or a small model"),
    Axis(name="draft_policy", kind="setting", home="forward", witness="drafts",
         meaning="whether as many tokens are proposed each time"),
    Axis(name="draft_length", kind="setting", home="forward", witness="all", evidence="draft_length",
         meaning="how many tokens are proposed ahead at most"),
    Axis(name="rollback", kind="setting", home="forward", witness="rollbacks",
         meaning="which requests a fast path decodes whose mistakes are found and rolled back"),
    Axis(name="scoring", kind="setting", home="forward", witness="drafts",
         meaning="generated tokens are computed one by one, or the same text is read as a prompt"),
    Axis(name="trainer", kind="setting", home="forward", witness="all", evidence="trainer",
         meaning="logprobs as they were sampled, or by a trainer's forward of the same weights and tokens"),
    Axis(name="replica", kind="setting", home="environment", witness="all", evidence="replica",
         meaning="which of two servers or engine replicas of one configuration answers"),
    Axis(name="isa", kind="setting", home="environment", witness="all", evidence="isa",
         meaning="the instruction set the kernels are built for"),
    Axis(name="compiler", kind="setting", home="environment", witness="all", evidence="compiler",
         meaning="the compiler that builds the kernels"),
    Axis(name="device", kind="setting", home="environment", witness="all", evidence="gpu_kernels",
         also=("logits_device",), meaning="the CPU, or an accelerator of the same host"),
    Axis(name="driver", kind="environment", home="environment", witness="all",
         meaning="a baseline, or the accelerator's driver as it is now",
         fields=("accelerator.driver", "accelerator.cuda_driver")),
    Axis(name="engine-version", kind="environment", home="environment", witness="all",
         meaning="a baseline, or the engine as it is now",
         fields=("samebits.*", "arithmetic.*", "kernels.*", "engine.*", "package.vllm", "package.vllm.*",
                 "package.sglang", "package.sglang.*", "package.transformers", "package.transformers.*")),
    Axis(name="torch-version", kind="environment", home="environment", witness="all",
         meaning="a baseline, or torch as it is now",
         fields=("package.torch", "package.torch.*", "arithmetic.torch", "blas.torch", "openmp.torch",
                 "accelerator.cuda", "accelerator.cublas", "accelerator.cudnn", "accelerator.nccl",
                 "accelerator.triton")),
    Axis(name="hardware", kind="environment", home="environment", witness="all",
         meaning="a baseline, or the processor and accelerators there are now",
         fields=("cpu.*", "accelerator.models", "accelerator.memory", "accelerator.compute_capability",
                 "accelerator.mig", "os.machine", "resolved.isa")),
    Axis(name="attention-backend", kind="environment", home="environment", witness="all",
         meaning="a baseline, or the attention kernels chosen now",
         fields=("config.attention_backend", "resolved.attention_backend", "env.VLLM_ATTENTION_BACKEND",
                 "accelerator.flash_attention", "accelerator.flashinfer")),
)  # fmt: skip

AXES: dict[str, Axis] = {axis.name: axis for axis in _LIST}
