"""The small parts: spelling, values as engines read them, line numbers of parsed trees, image names."""

from __future__ import annotations

from pathlib import PurePosixPath

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.doctor.engines import has_head_64, image_engine, image_version, is_server_image, name_hardware, split_image
from harness.doctor.launch import near_variable
from harness.doctor.near_miss import closest_name, edit_distance
from harness.doctor.nodes import Unparsable, parse_json, parse_toml, parse_yaml
from harness.doctor.source import kind_of
from harness.doctor.variables import FLAGS, VARIABLES, read_value

WORDS = st.text(alphabet="ABC_", max_size=8)


@given(WORDS, WORDS)
def test_distance_is_symmetric_and_zero_only_for_equals(left: str, right: str) -> None:
    assert edit_distance(left, right, 9) == edit_distance(right, left, 9)
    assert (edit_distance(left, right, 9) == 0) == (left == right)


@given(WORDS, WORDS)
def test_a_limit_never_changes_a_distance_within_it(left: str, right: str) -> None:
    exact = edit_distance(left, right, 9)
    for limit in range(4):
        assert edit_distance(left, right, limit) == min(exact, limit + 1)


@pytest.mark.parametrize(
    ("left", "right", "distance"),
    [("ABC", "ACB", 1), ("ABC", "AB", 1), ("ABC", "ABD", 1), ("ABC", "CBA", 2), ("", "AB", 2)],
)
def test_known_distances(left: str, right: str, distance: int) -> None:
    assert edit_distance(left, right, 5) == distance


@given(st.sampled_from(FLAGS), st.data())
def test_one_slip_in_any_flag_is_found(flag: str, data: st.DataObject) -> None:
    at = data.draw(st.integers(1, len(flag) - 1))
    slip = data.draw(st.sampled_from(["", "X", flag[at] + "X"]))
    word = flag[:at] + slip + flag[at + 1 :]
    assert near_variable(word) in ((None,) if word in VARIABLES else (flag,))


def test_known_and_far_names_are_not_near() -> None:
    assert closest_name("VLLM_BATCH_INVARIANT", FLAGS) is None
    for name in ("VLLM_USE_V1", "NCCL_DEBUG", "VLLM_LOGGING_LEVEL", "RCCL_ALGO", "DEEPINFER_ACCELERATOR", "PATH"):
        assert near_variable(name) is None


@pytest.mark.parametrize(
    ("name", "value", "state"),
    [
        ("VLLM_BATCH_INVARIANT", "1", "true"),
        ("VLLM_BATCH_INVARIANT", " 2 ", "true"),
        ("VLLM_BATCH_INVARIANT", "00", "false"),
        ("VLLM_BATCH_INVARIANT", "", "unreadable"),
        ("VLLM_BATCH_INVARIANT", "true", "unreadable"),
        ("VLLM_BATCH_INVARIANT", None, "unknown"),
        ("DEEPINFER_BATCH_INVARIANT", "FALSE", "true"),
        ("DEEPINFER_BATCH_INVARIANT", "no", "true"),
        ("DEEPINFER_BATCH_INVARIANT", "", "false"),
        ("SGLANG_ENABLE_DETERMINISTIC_INFERENCE", "Y", "true"),
        ("SGLANG_ENABLE_DETERMINISTIC_INFERENCE", "on", "unreadable"),
        ("VLLM_TRITON_FORCE_FIRST_CONFIG", "True", "true"),
        ("VLLM_TRITON_FORCE_FIRST_CONFIG", "yes", "false"),
    ],
)
def test_values_as_the_engines_read_them(name: str, value: str | None, state: str) -> None:
    assert read_value(VARIABLES[name], value) == state


def test_lines_of_json_yaml_and_toml() -> None:
    node = parse_json('{\n  "a": 1,\n  "b": {\n    "c": [\n      true]}}')
    assert [(key, line) for key, _, line in node.lines()] == [("a", 2), ("b", 3)]
    inner = node.get("b")
    assert inner is not None
    assert [(item.value, item.line) for item in inner.get("c").items] == [("true", 5)]  # type: ignore[union-attr]
    first, second = parse_yaml("a: |\n  text\n---\nb:\n  - x\n")
    assert (first.get("a").line, first.text("a")) == (2, "text\n")  # type: ignore[union-attr]
    assert second.get("b").items[0].line == 5  # type: ignore[union-attr]
    table = parse_toml('[x]\nk = 1\n[env]\n# c\nk = "2"\n')
    assert table.get("env").key_lines == [5]  # type: ignore[union-attr]


@pytest.mark.parametrize("text", ["", "{", '{"a"}', "[1", "]", "1 2", '"', "nul", "{]", "[1}", "-", "tru e"])
def test_what_is_no_json_is_refused(text: str) -> None:
    with pytest.raises(Unparsable):
        parse_json(text)


def test_merge_keys_keep_own_values() -> None:
    (root,) = parse_yaml("a: &a {k: 1, l: 2}\nb:\n  <<: *a\n  k: 3\n")
    node = root.get("b")
    assert node is not None
    assert (node.text("k"), node.text("l")) == ("3", "2")


def test_images() -> None:
    assert split_image("host:5000/a/b:tag@sha256:0") == ("host:5000/a/b", "tag", "sha256:0")
    assert split_image("host:5000/a/b") == ("host:5000/a/b", "", "")
    assert image_engine("vllm/vllm-openai:v0.26.0") == "vllm"
    assert image_engine("lmcache/vllm-router:1") == ""
    assert image_version("vllm/vllm-openai:v0.26.0-cu13") == "0.26.0"
    assert image_version("vllm/vllm-openai:latest") == ""
    assert is_server_image("docker.io/vllm/vllm-openai:x")
    assert not is_server_image("registry/vllm-runtime:x")


def test_hardware_and_heads() -> None:
    assert [name_hardware(words) for words in ("NVIDIA-H100-80GB", "gpu:v100:4", "amd.com/gpu", "nvidia-l4", "x")] == [
        "sm90",
        "sm70",
        "rocm",
        "sm89",
        "",
    ]
    assert has_head_64("meta-llama/Llama-3.2-1B-Instruct")
    assert not has_head_64("meta-llama/Llama-3.2-3B")


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("Dockerfile", "dockerfile"),
        ("Dockerfile.gpu", "dockerfile"),
        ("a/llm.Dockerfile", "dockerfile"),
        ("readers/dockerfile.py", "python"),
        ("Dockerfile.md", ""),
        ("Dockerfile.dockerignore", ""),
        (".env", "dotenv"),
        (".env.production", "dotenv"),
        ("llm.env", "dotenv"),
        ("llm.service.d/10-exact.conf", "systemd"),
        ("nginx.conf", ""),
        ("job.SBATCH", "shell"),
        ("values.yml", "yaml"),
        ("entrypoint", "maybe-shell"),
        ("model.safetensors", ""),
    ],
)
def test_kinds_by_name(name: str, kind: str) -> None:
    assert kind_of(PurePosixPath(name)) == kind
