"""Live mode: the same rules over observations, and the differences between files and engine."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.doctor.diagnose import diagnose
from harness.doctor.finding import Place, Severity
from harness.doctor.live import StaticSetting, check_observed, compare_static_live, static_settings
from harness.doctor.settings import DoctorSettings

CLOSED = {
    "VLLM_BATCH_INVARIANT": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_TRITON_FORCE_FIRST_CONFIG": "1",
}


def rules(*arguments: object) -> list[str]:
    return [finding.rule for finding in check_observed(*arguments)]  # type: ignore[arg-type]


def test_a_closed_vllm_is_clean() -> None:
    observed = {"attention_backend": "TRITON_ATTN", "enable_flashinfer_autotune": False}
    assert rules("vllm", {}, {}, observed, CLOSED) == []


def test_the_workers_environment_counts_not_the_parents() -> None:
    observed = {"attention_backend": "TRITON_ATTN", "enable_flashinfer_autotune": False}
    assert rules("vllm", {}, {}, observed, {"PATH": "/usr/bin"}) == ["vllm-flag-missing"]


def test_observed_values_win_over_resolved_and_requested() -> None:
    requested = {"attention_backend": "TRITON_ATTN", "enable_flashinfer_autotune": False}
    found = check_observed(
        "vllm", requested, {}, {"attention_backend": "FLASHINFER", "enable_prefix_caching": False}, CLOSED
    )
    assert [item.rule for item in found] == ["live-differs", "vllm-attention-backend"]
    assert found[0].message == "attention_backend was requested as `TRITON_ATTN` and is `FLASHINFER`"
    assert found[0].place == Place("live:vllm", 1)


def test_head_size_and_hardware_are_observed() -> None:
    observed = {
        "head_dim": 64,
        "device_name": "NVIDIA H200",
        "attention_backend": "FLASH_ATTN",
        "enable_flashinfer_autotune": False,
    }
    assert rules("vllm", {"model": "somebody/own-model"}, {}, observed, CLOSED) == ["vllm-head-size"]
    assert rules("vllm", {}, {}, {**observed, "device_name": "NVIDIA A100-SXM4-80GB"}, CLOSED) == []
    assert rules("vllm", {}, {}, {**observed, "device_name": "Tesla V100-SXM2"}, CLOSED) == ["vllm-hardware"]


def test_sglang_and_deepinfer_are_asked_their_own_rules() -> None:
    assert rules("sglang", {}, {}, {"attention_backend": "fa3"}, {}) == ["sglang-flag-missing"]
    assert rules("sglang", {}, {}, {"enable_deterministic_inference": True, "attention_backend": "fa3"}, {}) == []
    found = rules(
        "deepinfer",
        {},
        {},
        {"device_name": "NVIDIA B200"},
        {"DEEPINFER_BATCH_INVARIANT": "1", "DEEPINFER_ENABLE_MTP_VARLEN": "off"},
    )
    assert found == ["deepinfer-mtp-varlen"]


def test_live_misspelling_and_severity() -> None:
    quiet = DoctorSettings(
        severities={"vllm-autotune": Severity.OFF, "vllm-sampler": Severity.OFF, "flag-misspelt": Severity.NOTE}
    )
    found = check_observed("vllm", {}, {}, {}, {"VLLM_BATCH_INVARIENT": "1"}, settings=quiet)
    assert [(item.rule, item.severity) for item in found] == [("flag-misspelt", Severity.NOTE)]


def static(name: str, value: str | None) -> StaticSetting:
    return StaticSetting(name=name, value=value, place=Place("serve.sh", 3))


@pytest.mark.parametrize(
    ("setting", "observed", "environment", "expected"),
    [
        (static("max_num_seqs", "64"), {"max_num_seqs": 64}, {}, ""),
        (static("max_num_seqs", "64"), {"max_num_seqs": 32}, {},
         "the files say max_num_seqs=64; the running engine has `32`"),
        (static("max_num_seqs", None), {"max_num_seqs": 32}, {}, ""),
        (static("max_num_seqs", "64"), {}, {}, ""),
        (static("no_enable_prefix_caching", "true"), {"enable_prefix_caching": False}, {}, ""),
        (static("no_enable_prefix_caching", "true"), {"enable_prefix_caching": True}, {},
         "the files say no_enable_prefix_caching=true; the running engine has `true`"),
        (static("VLLM_BATCH_INVARIANT", "1"), {}, {"VLLM_BATCH_INVARIANT": "1"}, ""),
        (static("VLLM_BATCH_INVARIANT", "1"), {}, {"VLLM_BATCH_INVARIANT": "0"},
         "the files set VLLM_BATCH_INVARIANT=1; the worker has `0`"),
        (static("VLLM_BATCH_INVARIANT", "1"), {}, {},
         "the files set VLLM_BATCH_INVARIANT=1; the worker's environment does not have it"),
        (static("DEEPINFER_BATCH_INVARIANT", "1"), {}, {"DEEPINFER_BATCH_INVARIANT": "true"}, ""),
        (static("NCCL_ALGO", "Ring"), {}, {"NCCL_ALGO": "Tree"}, "the files set NCCL_ALGO=Ring; the worker has `Tree`"),
    ],
)  # fmt: skip
def test_static_against_live(
    setting: StaticSetting, observed: dict[str, object], environment: dict[str, str], expected: str
) -> None:
    found = compare_static_live([setting], observed, environment=environment)  # type: ignore[arg-type]
    assert [item.message for item in found] == ([expected] if expected else [])
    assert all((item.rule, item.place) == ("live-differs", Place("serve.sh", 3)) for item in found)


def test_unobserved_environment_is_no_difference() -> None:
    assert compare_static_live([static("VLLM_BATCH_INVARIANT", "1")], {}) == ()


def test_static_settings_come_from_the_launch(tmp_path: Path) -> None:
    (tmp_path / "serve.sh").write_text("export VLLM_BATCH_INVARIANT=1 OTHER=2\nvllm serve m --max-num-seqs 8\n")
    launches = diagnose([tmp_path], DoctorSettings()).launches
    found = static_settings(launches, "vllm")
    assert [(item.name, item.value, item.place.line) for item in found] == [
        ("VLLM_BATCH_INVARIANT", "1", 1),
        ("max_num_seqs", "8", 2),
        ("model", "m", 2),
    ]
    assert static_settings(launches, "sglang") == ()
