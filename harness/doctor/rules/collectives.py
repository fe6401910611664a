"""NCCL and cuBLAS variables: pins that are half a pin, values nobody accepts, settings an engine overwrites."""

from __future__ import annotations

from collections.abc import Iterator

from harness.doctor.facts import EnvSet
from harness.doctor.finding import Hit, Rule, Severity
from harness.doctor.launch import Launch, Scan

_WORKSPACES = frozenset({":4096:8", ":16:8"})
_PINNED_BY_VLLM = {
    "NCCL_ALGO": "ring,tree;allreduce:tree",
    "NCCL_PROTO": "Simple",
    "NCCL_MIN_NCHANNELS": "1",
    "NCCL_MAX_NCHANNELS": "1",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_COLLNET_ENABLE": "0",
    "NCCL_NTHREADS": "1",
    "NCCL_LAUNCH_MODE": "GROUP",
    "CUBLAS_WORKSPACE_CONFIG": ":16:8",
}
_PINNED_BY_SGLANG = {"NCCL_ALGO": "allreduce:tree"}


def find_workspace(scan: Scan) -> Iterator[Hit]:
    """CUBLAS_WORKSPACE_CONFIG with a value that gives no determinism."""
    for setting in scan.settings:
        if setting.name != "CUBLAS_WORKSPACE_CONFIG" or setting.value is None or setting.unset:
            continue
        if setting.value not in _WORKSPACES:
            shown = setting.value or "(empty)"
            message = f"CUBLAS_WORKSPACE_CONFIG is `{shown}`: only :4096:8 and :16:8 count"
            yield Hit(setting.place, message, setting.name)


def find_no_workspace(launch: Launch) -> Iterator[Hit]:
    """use_deterministic_algorithms without its cuBLAS workspace."""
    if launch.last("CUBLAS_WORKSPACE_CONFIG") is not None or launch.open or launch.misspelt:
        return
    if launch.engine == "vllm" and launch.mode_on:
        return  # the mode sets it
    for call in launch.calls:
        if call.name == "torch.use_deterministic_algorithms":
            message = "use_deterministic_algorithms without CUBLAS_WORKSPACE_CONFIG raises at the first cuBLAS call"
            yield Hit(call.place, message, "CUBLAS_WORKSPACE_CONFIG")


def _pins_itself(launch: Launch) -> bool:
    """vLLM's and SGLang's modes write their own NCCL variables."""
    return launch.engine in ("vllm", "sglang") and launch.mode_on


def find_half_pin(launch: Launch) -> Iterator[Hit]:
    """NCCL_ALGO without a channel count."""
    setting = launch.last("NCCL_ALGO")
    if setting is None or launch.open or _pins_itself(launch):
        return
    if launch.last("NCCL_MAX_NCHANNELS") is None or launch.last("NCCL_MIN_NCHANNELS") is None:
        message = "NCCL_ALGO is pinned and the channel count is not: it follows the message size"
        yield Hit(setting.place, message, "NCCL_MAX_NCHANNELS")


def find_starved(scan: Scan) -> Iterator[Hit]:
    """NCCL_ALGO that names some collectives only, beside NCCL_PROTO."""
    for launch in scan.launches:
        algorithm, protocol = launch.last("NCCL_ALGO"), launch.last("NCCL_PROTO")
        if algorithm is None or protocol is None or not algorithm.value or _pins_itself(launch):
            continue
        parts = [part.strip() for part in algorithm.value.split(";") if part.strip()]
        if all(":" in part for part in parts):
            message = f"NCCL_ALGO={algorithm.value} with NCCL_PROTO leaves the other collectives without an algorithm"
            yield Hit(algorithm.place, message, "NCCL_ALGO")


def find_overwritten(launch: Launch) -> Iterator[Hit]:
    """Pins that the engine's mode replaces by its own."""
    table = {"vllm": _PINNED_BY_VLLM, "sglang": _PINNED_BY_SGLANG}.get(launch.engine, {})
    if not launch.mode_on or launch.start.hardware in ("rocm", "cpu"):
        return
    if launch.engine == "sglang" and launch.option("tensor_parallel_size") in (None, "1"):
        return
    for name, value in sorted(table.items()):
        setting: EnvSet | None = launch.last(name)
        if setting is not None and setting.value is not None and not _same(setting.value, value, name):
            yield Hit(setting.place, f"{name}={setting.value} is replaced by `{value}` under the mode", name)


def _same(given: str, pinned: str, name: str) -> bool:
    if name == "CUBLAS_WORKSPACE_CONFIG":
        return given in _WORKSPACES
    return given.lower() == pinned.lower()


RULES = (
    Rule(
        id="cublas-workspace-value",
        engine="any",
        severity=Severity.ERROR,
        title="CUBLAS_WORKSPACE_CONFIG with a value that gives no determinism",
        why="torch refuses deterministic mode with it, and cuBLAS may use several workspaces.",
        mend="Set :4096:8 or :16:8.",
        facts="torch's notes on reproducibility; cuBLAS documentation",
        scan=find_workspace,
    ),
    Rule(
        id="cublas-workspace-missing",
        engine="any",
        severity=Severity.WARNING,
        title="use_deterministic_algorithms without CUBLAS_WORKSPACE_CONFIG",
        why="With CUDA 10.2 and newer torch raises at the first cuBLAS call.",
        mend="Set CUBLAS_WORKSPACE_CONFIG=:4096:8 before the first CUDA call.",
        facts="torch's notes on reproducibility",
        launch=find_no_workspace,
    ),
    Rule(
        id="nccl-half-pinned",
        engine="any",
        severity=Severity.WARNING,
        title="NCCL_ALGO without a pinned channel count",
        why="Each channel sums in its own tree and the count follows the message size: KL 0.151 against 0 at TP 4.",
        mend="Set NCCL_MIN_NCHANNELS and NCCL_MAX_NCHANNELS to the same number.",
        facts="SGLang PR 34159",
        launch=find_half_pin,
    ),
    Rule(
        id="nccl-starved",
        engine="any",
        severity=Severity.ERROR,
        title="NCCL_ALGO that leaves collectives without an algorithm",
        why="NCCL 2.31 and newer clear the table and enable only what is named; with NCCL_PROTO the rest fail.",
        mend="Write NCCL_ALGO=ring,tree;allreduce:tree.",
        facts="vLLM 0.32.0 `determinism/batch_invariant.py`",
        scan=find_starved,
    ),
    Rule(
        id="nccl-overwritten",
        engine="any",
        severity=Severity.NOTE,
        title="An NCCL or cuBLAS setting that the engine's mode replaces",
        why="The value in the file is not the value in force.",
        mend="Remove the line.",
        facts="vLLM 0.32.0 and SGLang 0.5.23 write these variables themselves",
        launch=find_overwritten,
    ),
)
