"""How an engine is recognised: module names, command names, image names, and the model's head size.

Data and lookups only. The head sizes are those of the models' own `config.json` files.
"""

from __future__ import annotations

import re

MODULES = {"vllm": "vllm", "sglang": "sglang", "deepinfer": "deepinfer", "tensorrt_llm": "tensorrt_llm"}

# Constructors, by engine: the last part of a dotted name under the engine's module.
CONSTRUCTORS = {
    "vllm": frozenset({"LLM", "EngineArgs", "AsyncEngineArgs"}),
    "sglang": frozenset({"Engine", "Runtime", "ServerArgs"}),
    "deepinfer": frozenset({"LLM"}),
    "tensorrt_llm": frozenset({"LLM"}),
}

SERVER_MODULES = {
    "vllm.entrypoints.openai.api_server": "vllm",
    "vllm.entrypoints.api_server": "vllm",
    "vllm.entrypoints.openai.run_batch": "vllm",
    "sglang.launch_server": "sglang",
    "tensorrt_llm.serve": "tensorrt_llm",
    "tensorrt_llm.commands.serve": "tensorrt_llm",
}

_IMAGE_WORDS = (
    ("vllm", "vllm"),
    ("sglang", "sglang"),
    ("deepinfer", "deepinfer"),
    ("tensorrt-llm", "tensorrt_llm"),
    ("tensorrt_llm", "tensorrt_llm"),
    ("trtllm", "tensorrt_llm"),
    ("text-generation-inference", "tgi"),
    ("llama.cpp", "llama.cpp"),
    ("ollama/ollama", "ollama"),
    ("lmdeploy", "lmdeploy"),
)
_NOT_ENGINES = ("router", "exporter", "frontend", "ui", "proxy", "gateway", "operator", "controller")

# Images whose entry point already is the server, so that the command holds only its options.
_SERVER_IMAGES = re.compile(r"(^|/)vllm-(openai|tpu|cpu-release-repo|cpu)$|^vllm/vllm-openai[a-z0-9-]*$")

_HEAD_64 = re.compile(
    r"smollm2-|smollm-|llama-3\.2-1b|qwen2(\.5)?-(coder-|math-)?0\.5b|tinyllama-1\.1b|gpt-oss-|opt-(125m|350m|1\.3b)|"
    r"pythia-(70m|160m|410m)|(^|/)gpt2$|granite-3\.[0-3]-2b",
    re.IGNORECASE,
)


def split_image(ref: str) -> tuple[str, str, str]:
    """(repository, tag, digest) of an image reference; tag and digest may be empty."""
    rest, _, digest = ref.partition("@")
    head, slash, last = rest.rpartition("/")
    name, _, tag = last.partition(":")
    return f"{head}{slash}{name}", tag, digest


def image_engine(ref: str) -> str:
    """The engine an image carries by its name, or ""."""
    repository, _, _ = split_image(ref.lower())
    last = repository.rsplit("/", 1)[-1]
    if any(word in re.split(r"[-_.]", last) for word in _NOT_ENGINES):
        return ""
    return next((engine for word, engine in _IMAGE_WORDS if word in repository), "")


def is_server_image(ref: str) -> bool:
    """Whether the image's entry point is the OpenAI server itself."""
    return bool(_SERVER_IMAGES.search(split_image(ref.lower())[0]))


def image_version(ref: str) -> str:
    """The release a tag names (`v0.26.0` -> `0.26.0`), or ""."""
    match = re.match(r"v?(\d+\.\d+(?:\.\d+)?)", split_image(ref)[1])
    return match[1] if match else ""


def has_head_64(model: str) -> bool:
    """Whether the model is one whose heads are 64 wide."""
    return bool(_HEAD_64.search(model))


_ENGINE_HARDWARE = (
    ("ascend", re.compile(r"ascend|\bnpu\b|atlas-?\d", re.IGNORECASE)),
    ("tpu", re.compile(r"\btpu|google\.com/tpu", re.IGNORECASE)),
    ("gaudi", re.compile(r"gaudi|habana|\bhpu\b", re.IGNORECASE)),
    ("rocm", re.compile(r"amd\.com/gpu|\brocm|\bmi(2|3)\d{2}x?\b", re.IGNORECASE)),
    ("cpu", re.compile(r"^cpu$|[ =:]cpu$|vllm-cpu", re.IGNORECASE)),
    ("sm70", re.compile(r"\bv100|volta", re.IGNORECASE)),
    ("sm75", re.compile(r"\bt4\b|tesla-t4|turing|rtx[ -_]?20\d0", re.IGNORECASE)),
    ("sm80", re.compile(r"\ba100|\ba30\b|\ba10g?\b|\ba40\b|rtx[ -_]?30\d0|\ba6000", re.IGNORECASE)),
    ("sm89", re.compile(r"\bl4\b|\bl40s?\b|rtx[ -_]?40\d0", re.IGNORECASE)),
    ("sm90", re.compile(r"\bh100|\bh200|\bh20\b|\bgh200|hopper", re.IGNORECASE)),
    ("sm100", re.compile(r"\bb100|\bb200|\bgb200|\bb300|\bgb300|blackwell", re.IGNORECASE)),
)


def name_hardware(words: str) -> str:
    """The accelerator family that a node selector, resource name, image or option names, or ""."""
    plain = words.replace("_", "-")
    return next((family for family, pattern in _ENGINE_HARDWARE if pattern.search(plain)), "")
