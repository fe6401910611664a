"""The bundled engine as the harness sees it before it runs: settings, modes, axes, models.

It does not start or import the engine. Rules: defaults are explicit and those of this machine; every axis
names all fingerprint fields that move with it; errors leave as the harness's own.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from engines.bundled_refusals import NOT_OFFERED
from engines.offline_adapter import offer_axes
from harness.engine import AxisSupport, Engine, ModelFacts, ModelInfo, Rule, Scalar, Setting, Tokenizer
from harness.errors import EngineDied, EngineError, ModelError, Unsupported

MOST_THREADS = 8  # more share one small model's step at a loss
COMPILERS = ("g++", "clang++")
IMAGE_MODEL = "tiny-vit"  # encodes images, in component cells; every other model is a language model
MOST_PATCHES = 8192  # of one request's images
ARITHMETICS = ("portable", "tensorcore", "free", "native")

_MODES = {
    "deterministic": "portable",
    "ordinary": "free",
    **{name: name for name in ARITHMETICS},
}
_MORE = {"tensorcore": {"device": "cuda", "dtype": "bfloat16"}}  # settings a mode brings beside its arithmetic

_KERNEL_FIELDS = (
    "resolved.isa",
    "resolved.compiler",
    "resolved.backend",
    "resolved.backend_reason",
    "resolved.kernels_digest",
    "kernels.*",
)
_ARITHMETIC_FIELDS = (
    "resolved.arithmetic",
    "resolved.definition",
    "resolved.chunk_width",
    "resolved.key_chunk",
    "resolved.weights",
    *_KERNEL_FIELDS,
    "arithmetic.*",
)
_TESTED_FIELDS = ("resolved.gpu_linear_test", "resolved.gpu_tree_test")  # how many products start-up tests compared
_CORE_FIELDS = ("resolved.rank_cores", "cpu.usable")  # ranks are bound to cores where there are enough of them
_RANK_FIELDS = (
    "resolved.tensor_parallel_size",
    "resolved.expert_parallel_size",
    "resolved.ranks",
    "resolved.collectives",
    *_CORE_FIELDS,
    "resolved.weights",  # fewer matrices in one process
    "resolved.gpu_fused",  # ranks on GPUs meet between operators
    "resolved.gpu_kernels_digest",  # compiled for what the first rank holds
    "arithmetic.torch",  # carries the collectives
    "resolved.gpu_graphs",  # ranks launch call by call
    "resolved.gpu_linear",  # chosen on the first rank's shapes
    "resolved.gpu_tree",
    "resolved.gpu_forms_test",
    "resolved.gpu_reports",  # ranks report from the host
    *_TESTED_FIELDS,
)
_DEVICE_FIELDS = (
    "resolved.device",
    "resolved.backend",
    "resolved.backend_reason",
    "resolved.weights",  # as the CPU's kernels keep them
    "resolved.num_pages",  # fewer where a card has too little memory
    "resolved.kv_fraction",
    "resolved.gpu",
    "resolved.gpu_capability",
    "resolved.gpu_compiler",
    "resolved.gpu_cuda",
    "resolved.gpu_fused",
    "resolved.gpu_graphs",
    "resolved.gpu_kernels_digest",
    "resolved.gpu_linked",
    "resolved.gpu_multiprocessors",
)
_AXES: dict[str, tuple[str, ...]] = {
    "batch": (),
    "companions": (),
    "load": (),
    "order": (),
    "arrivals": (),
    "seed": (),
    "server_history": (),
    "cached_prefix": (),
    "cache_restore": (),
    "max_num_seqs": ("config.max_num_seqs", "resolved.max_num_seqs", "resolved.num_pages", *_TESTED_FIELDS),
    "max_num_batched_tokens": (
        "config.max_num_batched_tokens",
        "resolved.max_num_batched_tokens",
        *_TESTED_FIELDS,
    ),
    "page_size": ("config.page_size", "resolved.page_size", "resolved.num_pages", "resolved.gpu_kernels_digest"),
    "num_pages": ("config.num_pages", "resolved.num_pages"),
    "policy": ("config.policy", "resolved.policy"),
    "priority_preempts": ("config.priority_preempts", "resolved.priority_preempts"),
    "async_scheduling": ("config.async_scheduling", "resolved.async_scheduling"),
    "draft": ("config.draft", "resolved.draft"),
    "draft_policy": ("config.draft_policy", "resolved.draft_policy"),
    "rollback": ("config.rollback", "resolved.rollback"),
    "scoring": ("config.scoring", "resolved.scoring"),
    "samples": ("config.samples", "resolved.samples"),
    "trainer": ("config.trainer", "resolved.trainer", "arithmetic.torch"),
    "observer": ("config.observer", "resolved.observer"),
    "restart": ("config.tuning", "resolved.tuning"),
    "enforce_eager": (
        "config.enforce_eager",
        "resolved.enforce_eager",
        "resolved.gpu_graphs",
        "resolved.gpu_forms_test",
    ),
    "kernel_caches": ("config.kernel_caches", "resolved.kernel_caches"),
    "device": ("config.device", *_DEVICE_FIELDS),
    "threads": (
        "config.threads",
        "resolved.threads",
        *_CORE_FIELDS,
        "env.OMP_NUM_THREADS",
        "env.MKL_NUM_THREADS",
    ),
    "tensor_parallel_size": ("config.tensor_parallel_size", *_RANK_FIELDS),
    "expert_parallel_size": ("config.expert_parallel_size", *_RANK_FIELDS),
    "replica": ("config.replica", "resolved.replica"),
    "disaggregated": ("config.disaggregated", "resolved.disaggregated"),
    "isa": ("config.isa", *_KERNEL_FIELDS),
    "compiler": ("config.compiler", *_KERNEL_FIELDS),
    "arithmetic": ("config.arithmetic", *_ARITHMETIC_FIELDS),
    "replica_arithmetic": ("config.replica_arithmetic", *_ARITHMETIC_FIELDS),
}

# Read when torch is imported: what closes cuBLASLt's split-K off (`engines.bundled.gpu.tensorcore.selftest`).
SPLIT_K_OFF = {
    "CUBLAS_WORKSPACE_CONFIG": ":16:8",
    "CUBLASLT_WORKSPACE_SIZE": "1",
    "TORCH_BLAS_PREFER_CUBLASLT": "1",
}
POLICIES = ("fcfs", "priority", "shortest")
FAULTS = (
    "none", "stale-page", "lost-flush", "short-hash", "misplaced-page", "clone-samples", "observer-draws",
    "shared-sampling", "shifted-masks", "unverified", "host-forward",
)  # fmt: skip


class BundledAdapter:
    """The adapter named "bundled"."""

    name = "bundled"

    def settings(self) -> tuple[Setting, ...]:
        """Every option `--set` accepts."""
        return (
            Setting(name="arithmetic", default="portable", choices=ARITHMETICS,
                    meaning="how sums are formed: by the written definition, in free order, or by torch"),
            Setting(name="async_scheduling", default=False, choices=(False, True),
                    meaning="schedule the next step while one runs"),
            Setting(name="device", default="cpu", choices=("cpu", "cuda", "emulated"),
                    meaning="where the forward pass runs; cuda: an NVIDIA GPU, portable with the same bits; emulated: "
                            "the GPU's float32 kernels on this host, for small models"),
            Setting(name="collectives", default="gloo", choices=("gloo", "nccl"),
                    meaning="what carries data between ranks; nccl: through a GPU per rank"),
            Setting(name="compiler", default="auto", choices=("auto", "g++", "clang++", "none"),
                    meaning="what builds the kernels; none: the checked fallback without own kernels"),
            Setting(name="dtype", default="float32", choices=("float32", "bfloat16"),
                    meaning="of weights and products; bfloat16: tensorcore, and free and native beside it, on a GPU"),
            Setting(name="disaggregated", default="off", choices=("off", "on", "prefill"),
                    meaning="prompts are computed in a process of their own and handed over; prefill: be that process"),
            Setting(name="draft", default="off", choices=("off", "lookup", "model"),
                    meaning="who proposes tokens ahead: nobody, the text so far, or the model's first layers"),
            Setting(name="draft_length", default=4, minimum=1, meaning="proposals verified in one step, at most"),
            Setting(name="draft_policy", default="fixed", choices=("fixed", "variable"),
                    meaning="propose always as many, or more after acceptance and fewer after rejection"),
            Setting(name="enforce_eager", default=False, choices=(False, True),
                    meaning="on a GPU every kernel is launched by itself, without recorded graphs"),
            Setting(name="expert_parallel_size", default=1, minimum=1,
                    meaning="processes that share the experts of a mixture"),
            Setting(name="k_order", default="chain", choices=("chain", "tree"),
                    meaning="in arithmetic tensorcore: how attention output and down projection are summed: in one "
                            "chain, or in chunks added by a tree, as any number of ranks would"),
            Setting(name="kernel_caches", default="kept", choices=("kept", "fresh"),
                    meaning="compiled kernels of earlier processes are used; fresh: all are compiled anew, in a folder "
                            "that goes with the process"),
            Setting(name="kv_fraction", default=0.0, minimum=0.0,
                    meaning="on a GPU, with num_pages 0: how much of the memory left after the weights the KV pages "
                            "take; 0: what num_pages says, within 0.8 of it"),
            Setting(name="observer", default="logprobs", choices=("logprobs", "none"),
                    meaning="what is reported beside the tokens; none: no log-softmax is computed"),
            Setting(name="replica", default="off", choices=("off", "first", "second", "both"),
                    meaning="which of two replicas behind one front serves; both: requests in turn"),
            Setting(name="replica_arithmetic", default="same", choices=("same", *ARITHMETICS),
                    meaning="arithmetic of the second replica"),
            Setting(name="rollback", default="off", choices=("off", "all", "request"),
                    meaning="which requests a fast path decodes, in windows of draft_length that are verified; "
                            "request: those that ask for it"),
            Setting(name="samples", default="together", choices=("together", "separate"),
                    meaning="the n samples of a request run together, or one after another as requests of their own"),
            Setting(name="scoring", default="decode", choices=("decode", "prefill"),
                    meaning="a forced path is decoded token by token, or read as a prompt"),
            Setting(name="seeding", default="request", choices=("request", "process"),
                    meaning="draws use the request's seed, or one this process took from the operating system"),
            Setting(name="fault", default="none", choices=FAULTS,
                    meaning="what the engine does wrong on purpose, so that a cell can be seen to notice"),
            Setting(name="isa", default="auto", choices=("auto", "x86-64-v3", "x86-64-v4", "generic"),
                    meaning="the instruction set the kernels are built for"),
            Setting(name="max_num_batched_tokens", default=4096, minimum=1,
                    meaning="tokens in one step; a longer prompt is prefilled in chunks"),
            Setting(name="max_num_seqs", default=16, minimum=1, meaning="sequences in one step"),
            Setting(name="num_pages", default=0, minimum=0,
                    meaning="KV pages in the pool; 0: as many as max_num_seqs contexts need, within 1.5 GiB"),
            Setting(name="page_size", default=16, minimum=1, meaning="tokens per KV page"),
            Setting(name="policy", default="fcfs", choices=POLICIES,
                    meaning="who runs first: first come, the more urgent, or the shorter prompt"),
            Setting(name="priority_preempts", default=True, choices=(False, True),
                    meaning="under policy priority one that runs gives way to a more urgent one that waits"),
            Setting(name="prefix_cache", default=False, choices=(False, True),
                    meaning="reuse pages of earlier requests where all tokens up to their end are the same"),
            Setting(name="rendezvous_port", default=0, minimum=0,
                    meaning="port of this machine where ranks find each other; 0: any free one"),
            Setting(name="tensor_parallel_size", default=1, minimum=1,
                    meaning="processes that share each layer, with their own part of weights and KV"),
            Setting(name="threads", default=_default_threads(), minimum=1,
                    meaning="threads that share one step, in each process"),
            Setting(name="trainer", default="off", choices=("off", "padded", "packed"),
                    meaning="forced texts are computed by a trainer's torch forward of the same weights: texts filled "
                            "up to the longest, or one after another in a row"),
            Setting(name="tuning", default=0, minimum=0,
                    meaning="an autotuner's choice: moves the order of sums in arithmetic free alone"),
        )  # fmt: skip

    def modes(self) -> Mapping[str, Mapping[str, Scalar]]:
        """The arithmetics by name; deterministic is portable, ordinary is free."""
        return {mode: {"arithmetic": arithmetic, **_MORE.get(mode, {})} for mode, arithmetic in sorted(_MODES.items())}

    def axes(self) -> Mapping[str, AxisSupport]:
        """Every axis this engine can vary, and what it cannot, with the reason."""
        return offer_axes(_AXES, NOT_OFFERED)

    def strongest_rule(self) -> Rule:
        """Logits can be digested at every position."""
        return "tensors"

    def models(self) -> tuple[ModelInfo, ...]:
        """The named models and the kinds of path."""
        from engines.bundled.models.catalogue import list_models

        return tuple(
            ModelInfo(name=name, description=description, available=available, how_to_get=how)
            for name, description, available, how in list_models()
        )

    def model_facts(self, model: str) -> ModelFacts:
        """Vocabulary and context. Raises ModelError."""
        from engines.bundled.models.catalogue import open_source

        if model == IMAGE_MODEL:
            return ModelFacts(name=model, vocab_size=1, max_position_embeddings=MOST_PATCHES)
        with harness_errors():
            config = open_source(model).config()
        return ModelFacts(
            name=model, vocab_size=config.vocab_size, max_position_embeddings=config.max_position_embeddings
        )

    def tokenizer(self, model: str) -> Tokenizer:
        """The model's tokenizer. Raises ModelError."""
        from engines.bundled.models.catalogue import open_source
        from engines.bundled_tokenizer import HarnessTokenizer

        if model == IMAGE_MODEL:
            from engines.bundled_vision import ImageTokenizer

            return ImageTokenizer()
        with harness_errors():
            return HarnessTokenizer(open_source(model).tokenizer())

    def environment(self, configuration: Mapping[str, Scalar]) -> Mapping[str, str]:
        """Threads as configured, waiting passively: spinning ones collapse throughput on shared cores."""
        threads = str(configuration.get("threads", _default_threads()))
        chosen = str(configuration.get("compiler", "auto"))
        fallback = chosen == "none" or (chosen == "auto" and not any(map(shutil.which, COMPILERS)))
        tensorcore = configuration.get("arithmetic") == "tensorcore"
        return {
            **(SPLIT_K_OFF if tensorcore else {}),
            **({"MKL_CBWR": "AVX2,STRICT"} if fallback else {}),  # the fallback's products are exact for more shapes
            "MKL_NUM_THREADS": threads,
            "OMP_DYNAMIC": "FALSE",
            "OMP_NUM_THREADS": threads,
            "OMP_WAIT_POLICY": "PASSIVE",
            "OPENBLAS_NUM_THREADS": "1",  # numpy multiplies nothing here
            "PYTHONHASHSEED": "0",
            "TOKENIZERS_PARALLELISM": "false",
        }

    def start(self, model: str, configuration: Mapping[str, Scalar]) -> Engine:
        """Loads the model and its kernels. Raises EngineError, ModelError, Unsupported."""
        from engines.bundled_lifetime import start_lifetime

        defaults = {setting.name: setting.default for setting in self.settings()}
        unknown = sorted(set(configuration) - set(defaults))
        if unknown:
            raise EngineError(f"engine 'bundled' has no setting {unknown[0]!r}; it has {', '.join(sorted(defaults))}")
        settings = {**defaults, **configuration}
        with harness_errors():
            if model == IMAGE_MODEL:
                from engines.bundled_vision import start_vision

                return start_vision(settings, defaults)
            if settings["replica"] != "off":
                from engines.bundled_replicas import start_replicas

                return start_replicas(model, settings, self.environment(settings))
            if settings["disaggregated"] == "on":
                from engines.bundled_disaggregated import start_disaggregated

                return start_disaggregated(model, settings, self.environment(settings))
            if settings["trainer"] != "off":
                from engines.bundled_trainer import start_trainer

                return start_trainer(model, settings)
            return start_lifetime(model, settings)


@contextmanager
def harness_errors() -> Iterator[None]:
    """Turns the bundled engine's errors into the harness's, word for word."""
    from engines.bundled import errors
    from engines.bundled.kernels.interface import KernelError

    try:
        yield
    except errors.ModelError as error:
        raise ModelError(str(error)) from error
    except errors.RankError as error:
        raise EngineDied(str(error)) from error  # what is left of the ranks is ended; nothing runs here any more
    except errors.NotSupported as error:
        raise Unsupported(str(error)) from error
    except (errors.BundledError, KernelError) as error:
        raise EngineError(str(error)) from error


def _default_threads() -> int:
    return min(len(os.sched_getaffinity(0)), MOST_THREADS)
