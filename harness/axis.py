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
    the whole process); "process nonce" stands for two different processes, and
    "lineage" for a variant that served something before. `fields` are the fingerprint fields
    of an environment axis: one of them must have changed since the baseline, or nothing was put to the test.
    """

    name: str
    kind: AxisKind
    home: Layer
    witness: WitnessKind
    meaning: str
    floor: FloorPlace = "same lifetime"
    evidence: str | None = None
    fields: tuple[str, ...] = ()


_LIST = (
    Axis(name="batch", kind="schedule", home="forward", witness="beside",
         meaning="one request at a time, or all of them together, arrivals staggered by steps"),
    Axis(name="companions", kind="schedule", home="forward", witness="composition",
         meaning="which other requests run beside the judged ones: none, or CORPUS:COUNT"),
    Axis(name="order", kind="schedule", home="forward", witness="composition",
         meaning="the order in which requests arrive"),
    Axis(name="arrivals", kind="schedule", home="forward", witness="beside",
         meaning="requests arrive alone, or while others are decoding"),
    Axis(name="max_num_seqs", kind="setting", home="forward", witness="beside",
         meaning="how many sequences may run in one step"),
    Axis(name="max_num_batched_tokens", kind="setting", home="forward", witness="chunks",
         meaning="tokens in one step; longer prompts are prefilled in chunks"),
    Axis(name="page_size", kind="setting", home="forward", witness="all", evidence="page_size",
         meaning="tokens per KV-cache page"),
    Axis(name="threads", kind="setting", home="parallelism", witness="all", evidence="threads",
         meaning="threads that share one step"),
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
    Axis(name="rollback", kind="setting", home="forward", witness="rollbacks",
         meaning="which requests a fast path decodes whose mistakes are found and rolled back"),
    Axis(name="scoring", kind="setting", home="forward", witness="drafts",
         meaning="generated tokens are computed one by one, or the same text is read as a prompt"),
    Axis(name="isa", kind="setting", home="environment", witness="all", evidence="isa",
         meaning="the instruction set the kernels are built for"),
    Axis(name="compiler", kind="setting", home="environment", witness="all", evidence="compiler",
         meaning="the compiler that builds the kernels"),
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
