"""DeepInfer 0.1.0: three conditions together, NVIDIA only.

Its README: DEEPINFER_BATCH_INVARIANT=1, DEEPINFER_ENABLE_MTP_VARLEN=0, and a fixed seq_seed per request. SM100 or
Ascend 950; the promise is for NVIDIA. DEEPINFER_USE_NEXTN_DECODE is a draft length, not a condition.
"""

from __future__ import annotations

from collections.abc import Iterator

from harness.doctor.finding import Hit, Rule, Severity
from harness.doctor.launch import Launch

MODE = "DEEPINFER_BATCH_INVARIANT"
VARLEN = "DEEPINFER_ENABLE_MTP_VARLEN"
LENGTH = "DEEPINFER_USE_NEXTN_DECODE"
_OUTSIDE = {
    "sm70": "V100",
    "sm75": "T4",
    "sm80": "Ampere",
    "sm89": "Ada",
    "sm90": "Hopper",
    "rocm": "AMD",
    "cpu": "a CPU",
}


def _deepinfer(launch: Launch) -> bool:
    return launch.engine == "deepinfer"


def _absent(launch: Launch, name: str) -> bool:
    lost = any(blocked.setting.name == name for blocked in launch.blocked)
    undone = any(setting.name == name and setting.unset for setting in launch.settings)
    return launch.state(name) == "absent" and not lost and not undone and name not in launch.misspelt


def find_missing(launch: Launch) -> Iterator[Hit]:
    """The first condition: the mode."""
    if _deepinfer(launch) and not launch.open and _absent(launch, MODE):
        yield Hit(launch.start.place, f"DeepInfer is started and nothing that reaches it sets {MODE}", MODE)


def find_varlen(launch: Launch) -> Iterator[Hit]:
    """The second condition: draft length fixed."""
    if not _deepinfer(launch):
        return
    setting = launch.last(VARLEN)
    if setting is not None and launch.state(VARLEN) == "true":
        strange = setting.value not in ("1", "true", "True")
        words = f"`{setting.value}`, which DeepInfer reads as on" if strange else "on"
        yield Hit(setting.place, f"{VARLEN} is {words}: draft lengths follow the batch", VARLEN)
        return
    if launch.open or not _absent(launch, VARLEN):
        return
    length = launch.last(LENGTH)
    half = f"; {LENGTH}={length.value} sets a length, not the condition" if length is not None else ""
    yield Hit(launch.start.place, f"{VARLEN}=0 is set nowhere{half}", VARLEN)


def find_seed(launch: Launch) -> Iterator[Hit]:
    """The third condition: a fixed seq_seed in every request."""
    if not _deepinfer(launch):
        return
    for request in launch.requests:
        if request.api != "deepinfer" or request.open:
            continue
        field = request.fields.get("seq_seed")
        if field is None:
            yield Hit(request.place, "SamplingParams without seq_seed draws a random 64-bit seed", "seq_seed")
        elif field.kind == "none":
            yield Hit(field.place, "seq_seed=None draws a random 64-bit seed", "seq_seed")


def find_platform(launch: Launch) -> Iterator[Hit]:
    """The mode on a platform that the promise does not cover."""
    if not _deepinfer(launch):
        return
    chosen = launch.last("DEEPINFER_ACCELERATOR")
    hardware = launch.start.hardware
    if launch.mode_on and ((chosen is not None and chosen.value == "ascend") or hardware == "ascend"):
        place = chosen.place if chosen is not None else launch.start.place
        yield Hit(place, "the mode is asserted off on Ascend; the promise is for NVIDIA only", MODE)
    elif hardware in _OUTSIDE:
        yield Hit(launch.start.place, f"DeepInfer runs on SM100 or Ascend 950, not on {_OUTSIDE[hardware]}", hardware)


RULES = (
    Rule(
        id="deepinfer-flag-missing",
        engine="deepinfer",
        severity=Severity.ERROR,
        title="DeepInfer without its batch-invariant mode",
        why="Deterministic results need three conditions together; without this one the batch decides.",
        mend="Set DEEPINFER_BATCH_INVARIANT=1 before the workers start.",
        facts="README of 0.1.0",
        launch=find_missing,
    ),
    Rule(
        id="deepinfer-mtp-varlen",
        engine="deepinfer",
        severity=Severity.ERROR,
        title="DeepInfer without DEEPINFER_ENABLE_MTP_VARLEN=0",
        why="Two and a half conditions are not three: confidence-scheduled drafts change the shapes of verification.",
        mend="Set DEEPINFER_ENABLE_MTP_VARLEN=0, spelt 0, false or False: other words count as on.",
        facts="README and `environ.py` of 0.1.0; DEEPINFER_USE_NEXTN_DECODE (default 5) only bounds the length",
        launch=find_varlen,
    ),
    Rule(
        id="deepinfer-seq-seed",
        engine="deepinfer",
        severity=Severity.ERROR,
        title="DeepInfer requests without a fixed seq_seed",
        why="The default is a random 64-bit number, drawn without a word.",
        mend="Pass seq_seed=<a number derived from the request> to every SamplingParams.",
        facts="`sampling_params.py` of 0.1.0",
        launch=find_seed,
    ),
    Rule(
        id="deepinfer-platform",
        engine="deepinfer",
        severity=Severity.ERROR,
        title="DeepInfer on a platform the promise does not cover",
        why="Batch invariance is promised on NVIDIA SM100 only; the NPU worker asserts that it is off.",
        mend="Run it on SM100, or drop the promise.",
        facts="README and `worker/runtime_config.py` of 0.1.0",
        launch=find_platform,
    ),
)
