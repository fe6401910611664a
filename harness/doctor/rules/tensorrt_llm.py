"""TensorRT-LLM: FORCE_DETERMINISTIC, undocumented and filtered away by its server."""

from __future__ import annotations

from collections.abc import Iterator

from harness.doctor.finding import Hit, Rule, Severity
from harness.doctor.launch import Launch

MODE = "FORCE_DETERMINISTIC"


def _trt(launch: Launch) -> bool:
    return launch.engine == "tensorrt_llm"


def find_missing(launch: Launch) -> Iterator[Hit]:
    """TensorRT-LLM started without the variable."""
    lost = any(blocked.setting.name == MODE for blocked in launch.blocked)
    if _trt(launch) and launch.state(MODE) == "absent" and not launch.open and not lost and MODE not in launch.misspelt:
        yield Hit(launch.start.place, f"TensorRT-LLM is started and nothing that reaches it sets {MODE}", MODE)


def find_served(launch: Launch) -> Iterator[Hit]:
    """The variable under trtllm-serve."""
    setting = launch.last(MODE)
    if _trt(launch) and launch.start.server and setting is not None and launch.state(MODE) != "false":
        yield Hit(setting.place, f"{MODE} does not reach the workers of trtllm-serve", MODE)


def find_autotuner(launch: Launch) -> Iterator[Hit]:
    """The autotuner on several ranks."""
    size = launch.option("tensor_parallel_size")
    several = size is not None and size.isdecimal() and int(size) > 1
    off = launch.option("enable_autotuner") in ("false", "?")
    if _trt(launch) and launch.mode_on and several and not off and not launch.start.server:
        message = f"the autotuner picks tactics per rank and per run (tensor_parallel_size={size})"
        yield Hit(launch.start.place, message, "enable_autotuner")


RULES = (
    Rule(
        id="trtllm-flag-missing",
        engine="tensorrt_llm",
        severity=Severity.WARNING,
        title="TensorRT-LLM without FORCE_DETERMINISTIC",
        why="It is the only switch there is; even with it a list of uncovered sources stays open.",
        mend="Set FORCE_DETERMINISTIC=1 for the LLM API; for trtllm-serve there is no working switch.",
        facts="TensorRT-LLM RFC 19501 lists nine and more uncovered sources",
        launch=find_missing,
    ),
    Rule(
        id="trtllm-serve-filters",
        engine="tensorrt_llm",
        severity=Severity.ERROR,
        title="FORCE_DETERMINISTIC under trtllm-serve",
        why="The server filters its workers' environment, so the variable is set and has no effect.",
        mend="Use the LLM API in-process, or a version with PR 13290, and check the running engine.",
        facts="TensorRT-LLM PR 13290",
        launch=find_served,
    ),
    Rule(
        id="trtllm-autotuner",
        engine="tensorrt_llm",
        severity=Severity.WARNING,
        title="TensorRT-LLM's autotuner on several ranks",
        why="Tactics are chosen by timing; ranks and runs choose differently.",
        mend="Pass enable_autotuner=False, or keep one tuning cache for all.",
        facts="TensorRT-LLM PR 16782",
        launch=find_autotuner,
    ),
)
