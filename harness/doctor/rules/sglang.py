"""SGLang: deterministic inference, what it refuses, what it drops, and its constant sampling seed (0.5.23)."""

from __future__ import annotations

from collections.abc import Iterator

from harness.doctor.finding import Hit, Rule, Severity
from harness.doctor.launch import Launch

_BACKENDS = frozenset({"fa3", "fa4", "flashinfer", "triton", "ascend"})
_VARIABLE = "SGLANG_ENABLE_DETERMINISTIC_INFERENCE"
_REFUSED = {("bf16_gemm_backend", "cutedsl"): "--bf16-gemm-backend cutedsl depends on the batch and is refused"}
_DROPPED = (
    ("enable_flashinfer_allreduce_fusion", "FlashInfer's fused all-reduce is switched off"),
    ("enable_aiter_allreduce_fusion", "AITER's fused all-reduce is switched off"),
    ("enable_torch_symm_mem", "symmetric-memory all-reduce is switched off"),
)


def _sglang(launch: Launch) -> bool:
    return launch.engine == "sglang"


def find_missing(launch: Launch) -> Iterator[Hit]:
    """SGLang started without the flag."""
    if not _sglang(launch) or launch.mode_on or launch.start.options_open or launch.last(_VARIABLE) is not None:
        return
    if not any(lost.setting.name == _VARIABLE for lost in launch.blocked):
        yield Hit(launch.start.place, "SGLang is started without --enable-deterministic-inference", "flag")


def find_variable_only(launch: Launch) -> Iterator[Hit]:
    """The variable in place of the flag."""
    setting = launch.last(_VARIABLE)
    if _sglang(launch) and setting is not None and not launch.mode_on and not launch.start.options_open:
        yield Hit(setting.place, f"{_VARIABLE} is overwritten at start from the flag, which is not given", _VARIABLE)


def find_attention(launch: Launch) -> Iterator[Hit]:
    """An attention backend that deterministic inference does not cover."""
    for name in ("attention_backend", "prefill_attention_backend", "decode_attention_backend"):
        given = launch.option(name)
        if _sglang(launch) and launch.mode_on and given not in (None, "?", "none") and given not in _BACKENDS:
            yield Hit(launch.options[name].place, f"{name.replace('_', '-')} {given} is not covered", name)


def find_radix(launch: Launch) -> Iterator[Hit]:
    """A radix cache that the flag switches off."""
    if not _sglang(launch) or not launch.mode_on or not launch.lacks("disable_radix_cache"):
        return
    backend = launch.option("attention_backend")
    if backend == "flashinfer":
        yield Hit(launch.start.place, "with flashinfer the radix cache is switched off under the flag", "radix")
    elif backend is None and launch.start.hardware == "sm100":
        message = "on Blackwell the flag chooses flashinfer for most models, which switches the radix cache off"
        yield Hit(launch.start.place, message, "radix")


def find_default_seed(launch: Launch) -> Iterator[Hit]:
    """Several samples of one request under one constant seed."""
    if not _sglang(launch) or not launch.mode_on:
        return
    for request in launch.requests:
        count = request.fields.get("n")
        if request.api not in ("sglang", "endpoint") or count is None or request.open:
            continue
        seeded = "sampling_seed" in request.fields or "seed" in request.fields
        if count.kind == "constant" and count.value.isdecimal() and int(count.value) > 1 and not seeded:
            message = f"n={count.value} samples without a seed all get seed 42, so they are the same sample"
            yield Hit(request.place, message, "sampling_seed")


def find_refused(launch: Launch) -> Iterator[Hit]:
    """Options that deterministic inference refuses or drops."""
    if not _sglang(launch) or not launch.mode_on:
        return
    for (name, value), message in _REFUSED.items():
        if launch.option(name) == value:
            yield Hit(launch.options[name].place, message, name)
    for name, message in _DROPPED:
        if launch.option(name) not in (None, "false", "none", "?"):
            yield Hit(launch.options[name].place, f"--{name.replace('_', '-')}: {message} under the flag", name)
    sampler = launch.option("sampling_backend")
    if sampler not in (None, "?", "pytorch", "ascend", "none"):
        place = launch.options["sampling_backend"].place
        yield Hit(place, f"--sampling-backend {sampler} is replaced by pytorch under the flag", "sampling_backend")


RULES = (
    Rule(
        id="sglang-flag-missing",
        engine="sglang",
        severity=Severity.WARNING,
        title="SGLang without deterministic inference",
        why="Without the flag kernels split work by the batch, and results move with it.",
        mend="Start with --enable-deterministic-inference.",
        launch=find_missing,
    ),
    Rule(
        id="sglang-variable-only",
        engine="sglang",
        severity=Severity.ERROR,
        title="SGLANG_ENABLE_DETERMINISTIC_INFERENCE in place of the flag",
        why="The server writes the variable itself from its command line: setting it does nothing.",
        mend="Start with --enable-deterministic-inference.",
        facts="0.5.23 `srt/arg_groups/serving_hook.py`",
        launch=find_variable_only,
    ),
    Rule(
        id="sglang-attention-backend",
        engine="sglang",
        severity=Severity.ERROR,
        title="An attention backend that deterministic inference does not cover",
        why="Start-up refuses another --attention-backend; the separate prefill and decode options are not checked.",
        mend="Use fa3, fa4, flashinfer, triton or ascend.",
        facts="0.5.23 `srt/arg_groups/overrides.py`",
        launch=find_attention,
    ),
    Rule(
        id="sglang-radix-cache",
        engine="sglang",
        severity=Severity.NOTE,
        title="The radix cache switched off by the flag",
        why="With flashinfer the flag drops the radix cache and takes a 2 GiB workspace; one operator had an outage.",
        mend="Say --disable-radix-cache, or use fa3, fa4 or triton.",
        facts="0.5.23; Blackwellboy/model-serving-minefield#73",
        launch=find_radix,
    ),
    Rule(
        id="sglang-default-seed",
        engine="sglang",
        severity=Severity.ERROR,
        title="Several samples under SGLang's constant default seed",
        why="Under the flag a request without a seed gets seed 42, so n samples are n copies.",
        mend="Send each sample as its own request with its own sampling_seed.",
        facts="0.5.23 `srt/sampling/sampling_batch_info.py`; Tencent-Hunyuan/UniRL#208",
        launch=find_default_seed,
    ),
    Rule(
        id="sglang-dropped-option",
        engine="sglang",
        severity=Severity.NOTE,
        title="An option that deterministic inference refuses or drops",
        why="What the command line says is not what runs.",
        mend="Remove the option.",
        facts="0.5.23",
        launch=find_refused,
    ),
)
