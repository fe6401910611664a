"""transformers in a process of ours, as the harness sees it before it runs: settings, modes, axes, models.

It does not import transformers or torch. Rules: an axis names all fingerprint fields that move with it; what the chosen
way of batching cannot vary is refused while planning, with the reason; the engine itself is started by
`engines.transformers_lifetime`, in the child.
"""

from __future__ import annotations

from collections.abc import Mapping

from engines import hf_folders
from engines.offline_adapter import OfflineAdapter
from engines.offline_checks import NEEDS_PATH, default_threads
from harness.engine import Engine, Replay, Scalar, Setting
from harness.errors import Unsupported
from harness.packages import is_installed

NOT_INSTALLED = "transformers is not installed here: `pip install samebits[transformers]`"
BACKENDS = ("eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention")
_SETTINGS = (
    Setting(name="attention_backend", default="sdpa", choices=BACKENDS,
            meaning="transformers' attn_implementation; continuous batching makes its own paged form of eager"),
    Setting(name="batch_invariant_ops", default=False, choices=(False, True),
            meaning="Thinking Machines' operators in place of torch's, on GPUs: some operators, not attention"),
    Setting(name="batching", default="static", choices=("static", "continuous"),
            meaning="generate() on left-padded batches, or transformers' continuous batching"),
    Setting(name="deterministic_algorithms", default=False, choices=(False, True),
            meaning="torch.use_deterministic_algorithms: refuses kernels that vary from run to run"),
    Setting(name="device", default="auto", choices=("auto", "cpu", "cuda"), meaning="auto: a GPU if there is one"),
    Setting(name="dtype", default="float32", choices=("bfloat16", "float16", "float32"),
            meaning="weights and activations"),
    Setting(name="max_num_batched_tokens", default=0, minimum=0,
            meaning="tokens in one step; static: prompts are prefilled in chunks of that many tokens over all rows; "
                    "0: prompts whole (static), 8192 (continuous)"),
    Setting(name="max_num_seqs", default=16, minimum=1, meaning="rows in one batch"),
    Setting(name="num_pages", default=256, minimum=2, meaning="KV blocks in the pool; continuous batching alone"),
    Setting(name="padding", default=0, minimum=0,
            meaning="masked tokens put to the left of every row, beside what the longest row demands; static alone"),
    Setting(name="page_size", default=32, minimum=4, meaning="tokens per KV page; continuous batching alone"),
    Setting(name="prefix_cache", default=False, choices=(False, True),
            meaning="allow_block_sharing of continuous batching"),
    Setting(name="scoring", default="decode", choices=("decode", "prefill"),
            meaning="golden paths are generated token by token, or read as a prompt; static alone"),
    Setting(name="threads", default=default_threads(), minimum=1, meaning="torch's threads"),
)  # fmt: skip
_MODES: dict[str, dict[str, Scalar]] = {
    "ordinary": {"batch_invariant_ops": False, "deterministic_algorithms": False},
    "deterministic": {"batch_invariant_ops": False, "deterministic_algorithms": True},
    "batch-invariant-ops": {"batch_invariant_ops": True, "deterministic_algorithms": True},
}
_AXES: dict[str, tuple[str, ...]] = {
    "arrivals": (),
    "attention_backend": (),
    "batch": (),
    "cached_prefix": (),
    "companions": (),
    "load": (),
    "dtype": (),
    "max_num_batched_tokens": (),
    "max_num_seqs": (),
    "order": (),
    "padding": (),
    "page_size": (),
    "restart": (),
    "scoring": (),
    "server_history": (),
    "threads": ("env.OMP_NUM_THREADS", "env.MKL_NUM_THREADS"),
}
_REFUSED = {
    "async_scheduling": "this adapter steps transformers itself, one step at a time",
    "cache_restore": "transformers keeps no prefix cache beyond its process",
    "data_parallel_size": "one process, one replica",
    "draft": "this adapter runs no assisted generation",
    "num_pages": "transformers swaps requests out or starts them over when pages run out; this adapter refuses that",
    "pipeline_parallel_size": "this adapter loads the whole model onto one device",
    "samples": "this adapter runs n = 1",
    "tensor_parallel_size": "this adapter loads the whole model onto one device",
}
_ONE_WAY = {  # axis to the value of `batching` under which it can be varied
    "cached_prefix": "continuous",
    "padding": "static",
    "page_size": "continuous",
    "scoring": "static",
}


class TransformersAdapter(OfflineAdapter):
    """The adapter named "transformers".

    Its modes are ordinary (as it comes), deterministic (torch's flag), batch-invariant-ops (that and four operators).
    """

    name = "transformers"
    options = _SETTINGS
    presets = _MODES
    offered = _AXES
    refused = _REFUSED
    rule = "tensors"  # raw logits are seen at every position

    def refuses(self, axis: str, replay: Replay, configuration: Mapping[str, Scalar]) -> str | None:
        """Why a cell cannot be run with these settings, or None."""
        values = self.complete(configuration)
        wanted = _ONE_WAY.get(axis)
        if wanted is not None and values["batching"] != wanted:
            return f"axis {axis!r} needs batching={wanted}, batching={values['batching']} is set"
        if axis == "cached_prefix" and not values["prefix_cache"]:
            return "axis 'cached_prefix' needs prefix_cache=true"
        if axis == "scoring" and replay != "golden":
            return NEEDS_PATH
        return None

    def variables(self, settings: Mapping[str, Scalar]) -> Mapping[str, str]:
        """Threads, and what torch's deterministic algorithms demand of cuBLAS."""
        threads = str(settings["threads"])
        return {
            "MKL_NUM_THREADS": threads,
            "OMP_DYNAMIC": "FALSE",
            "OMP_NUM_THREADS": threads,
            "TRANSFORMERS_OFFLINE": "1",
            **({"CUBLAS_WORKSPACE_CONFIG": ":4096:8"} if settings["deterministic_algorithms"] else {}),
        }

    def open(self, model: str, settings: Mapping[str, Scalar]) -> Engine:
        """Starts the engine. Raises EngineError, ModelError, Unsupported."""
        if not (is_installed("transformers") and is_installed("torch")):
            raise Unsupported(NOT_INSTALLED)
        from engines.transformers_lifetime import start_lifetime

        folder = hf_folders.open_folder(model)
        name = model if model in hf_folders.NAMES else folder.name
        return start_lifetime(name, folder, settings)
