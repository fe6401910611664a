"""The command: exit codes, formats, settings, suppressed severities, live with a stand-in."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from harness.doctor.cli import doctor_command
from harness.doctor.live import Observation, Observe
from harness.engine import Scalar
from harness.errors import UsageError

BAD = "export VLLM_BATCH_INVARIANT=0\n"


def call(*arguments: object, observe: Observe | None = None) -> tuple[int, str]:
    """(exit code, output) of the command as the command line runs it."""
    result = CliRunner().invoke(doctor_command(observe), [str(word) for word in arguments], standalone_mode=False)
    if result.exception is not None:
        raise result.exception
    return result.return_value, result.output


@pytest.fixture
def script(tmp_path: Path) -> Path:
    file = tmp_path / "env.sh"
    file.write_text(BAD)
    return file


def test_findings_give_one_and_text(script: Path) -> None:
    code, output = call(script)
    assert code == 1
    assert output.startswith(
        f"{script}:1: error[flag-false]: VLLM_BATCH_INVARIANT is `0`, which vllm reads as off\n    why:  "
    )
    assert output.endswith("1 finding (1 error); 1 file read, 0 launches found\n")
    assert "\x1b" not in output


def test_clean_gives_zero_and_says_what_was_read(script: Path) -> None:
    script.write_text("export VLLM_BATCH_INVARIANT=1\n")
    assert call(script) == (0, "no findings; 1 file read, 0 launches found\n")


def test_json(script: Path) -> None:
    code, output = call("--format", "json", script)
    table = json.loads(output)
    assert code == 1
    assert table["schema"] == 1
    assert table["files"] == 1
    (finding,) = table["findings"]
    assert set(finding) == {"path", "line", "rule", "severity", "message", "why", "mend"}
    assert (finding["path"], finding["line"], finding["rule"], finding["severity"]) == (
        str(script),
        1,
        "flag-false",
        "error",
    )


def test_sarif_has_the_shape_of_2_1_0(script: Path) -> None:
    _, output = call("--format", "sarif", script)
    log = json.loads(output)
    assert log["version"] == "2.1.0"
    assert log["$schema"].endswith("sarif-2.1.0.json")
    (run,) = log["runs"]
    driver = run["tool"]["driver"]
    (result,) = run["results"]
    rule = driver["rules"][result["ruleIndex"]]
    assert rule["id"] == result["ruleId"] == "flag-false"
    assert rule["defaultConfiguration"] == {"enabled": True, "level": "error"}
    assert result["level"] == "error"
    place = result["locations"][0]["physicalLocation"]
    assert place["region"] == {"startLine": 1}
    assert place["artifactLocation"]["uri"] == f"file://{script}"
    assert len({item["id"] for item in driver["rules"]}) == len(driver["rules"])
    assert all(item["shortDescription"]["text"] and item["help"]["text"] for item in driver["rules"])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "give at least one path"),
        (["nowhere"], "give an existing path"),
        (["--live", "."], "--live needs --engine"),
        (["--engine", "vllm", "."], "belong to --live"),
        (["--live", "--engine", "vllm"], "no engine is attached"),
        (["--config", "nowhere.toml", "."], "no such file"),
        (["--live", "--engine", "vllm", "--set", "x"], "expected KEY=VALUE"),
        (["empty"], "no file here is of a kind the doctor reads"),
    ],
)
def test_usage_errors(arguments: list[str], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.sh").write_text("echo\n")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match=words) as caught:
        call(*arguments)
    assert caught.value.exit_code == 2


def test_unknown_format_is_a_usage_error(script: Path) -> None:
    with pytest.raises(click.UsageError, match="not one of"):
        call("--format", "xml", script)


def test_exclude(script: Path) -> None:
    (script.parent / "old").mkdir()
    (script.parent / "old" / "b.sh").write_text(BAD)
    assert call("--exclude", "old/*", "--format", "json", script.parent)[1].count('"flag-false"') == 1
    assert call(script.parent)[1].count("error[flag-false]") == 2
    with pytest.raises(UsageError, match="no file here"):
        call("--exclude", "old/*", "--exclude", "*.sh", script.parent)


@pytest.mark.parametrize("name", ["pyproject.toml", "samebits.toml"])
def test_severity_per_rule(name: str, script: Path) -> None:
    table = "tool.samebits.doctor" if name == "pyproject.toml" else "doctor"
    settings = script.parent / name
    settings.write_text(f'[{table}]\nflag-false = "note"\n')
    assert "note[flag-false]" in call(script)[1]
    settings.write_text(f'[{table}]\nflag-false = "off"\n')
    assert call(script)[0] == 0
    log = json.loads(call("--format", "sarif", script)[1])
    rules = {item["id"]: item for item in log["runs"][0]["tool"]["driver"]["rules"]}
    assert rules["flag-false"]["defaultConfiguration"] == {"enabled": False, "level": "none"}


def test_nearest_settings_win_and_config_overrides(script: Path) -> None:
    inner = script.parent / "inner"
    inner.mkdir()
    (inner / "a.sh").write_text(BAD)
    (script.parent / "samebits.toml").write_text('[doctor]\nflag-false = "off"\n')
    assert call(inner)[0] == 0
    (inner / "samebits.toml").write_text('[doctor]\nflag-false = "warning"\n')
    assert "warning[flag-false]" in call(inner)[1]
    assert call("--config", script.parent / "samebits.toml", inner)[0] == 0


def test_every_mistake_in_the_settings_is_named(script: Path) -> None:
    (script.parent / "pyproject.toml").write_text(
        '[tool.samebits.doctor]\nflag-fals = "off"\nseed-none = "loud"\nvllm-autotune = 3\n'
    )
    with pytest.raises(UsageError) as caught:
        call(script)
    message = str(caught.value)
    assert "$.tool.samebits.doctor.flag-fals: no such rule; did you mean `flag-false`?" in message
    assert "$.tool.samebits.doctor.seed-none: expected one of error, warning, note, off, got 'loud'" in message
    assert "$.tool.samebits.doctor.vllm-autotune: expected one of" in message


def test_a_doctor_table_in_the_wrong_place_is_named(script: Path) -> None:
    (script.parent / "pyproject.toml").write_text('[doctor]\nflag-false = "off"\n')
    with pytest.raises(UsageError, match=r"belongs under \[tool.samebits.doctor\]"):
        call(script)


def test_broken_settings_are_a_usage_error(script: Path) -> None:
    (script.parent / "samebits.toml").write_text("[doctor\n")
    with pytest.raises(UsageError, match="cannot be read as TOML"):
        call(script)


def test_a_suppression_of_a_silenced_rule_is_left_alone(script: Path) -> None:
    script.write_text("# samebits: allow flag-false baseline\n" + BAD)
    (script.parent / "samebits.toml").write_text('[doctor]\nflag-false = "off"\n')
    assert call(script)[0] == 0


def test_live_asks_the_stand_in_and_names_differences(tmp_path: Path) -> None:
    asked: list[tuple[str, str, Mapping[str, Scalar]]] = []

    def observe(engine: str, model: str, settings: Mapping[str, Scalar]) -> Observation:
        asked.append((engine, model, settings))
        observed: dict[str, Scalar] = {
            "attention_backend": "FLASH_ATTN",
            "max_num_seqs": 4,
            "enable_flashinfer_autotune": False,
        }
        return Observation(requested=settings, observed=observed, environment={"VLLM_USE_FLASHINFER_SAMPLER": "0"})

    (tmp_path / "serve.sh").write_text(
        "export VLLM_BATCH_INVARIANT=1 VLLM_USE_FLASHINFER_SAMPLER=0 VLLM_TRITON_FORCE_FIRST_CONFIG=1\n"
        "vllm serve Qwen/Qwen3-8B --max-num-seqs 64 --no-enable-flashinfer-autotune\n"
    )
    code, output = call(
        tmp_path, "--live", "--engine", "vllm", "--model", "Qwen/Qwen3-8B", "--set", "max_num_seqs=8",
        "--set", "eager=true",
        "--format", "json", observe=observe,
    )  # fmt: skip
    assert code == 1
    assert asked == [("vllm", "Qwen/Qwen3-8B", {"max_num_seqs": 8, "eager": True})]
    found = {(Path(item["path"]).name, item["rule"], item["message"]) for item in json.loads(output)["findings"]}
    assert found == {
        ("live:vllm", "live-differs", "max_num_seqs was requested as `8` and is `4`"),
        ("live:vllm", "vllm-flag-missing", "vLLM is started and nothing that reaches it sets VLLM_BATCH_INVARIANT"),
        ("serve.sh", "live-differs", "the files say max_num_seqs=64; the running engine has `4`"),
        ("serve.sh", "live-differs", "the files set VLLM_BATCH_INVARIANT=1; the worker's environment does not have it"),
        (
            "serve.sh",
            "live-differs",
            "the files set VLLM_TRITON_FORCE_FIRST_CONFIG=1; the worker's environment does not have it",
        ),
    }


def test_live_without_paths_is_allowed() -> None:
    def observe(engine: str, model: str, settings: Mapping[str, Scalar]) -> Observation:
        return Observation(observed={"enable_deterministic_inference": True, "attention_backend": "triton"})

    assert call("--live", "--engine", "sglang", observe=observe)[0] == 0


def test_importing_the_command_brings_in_nothing_heavy() -> None:
    import subprocess
    import sys

    heavy = "[m for m in ('torch', 'numpy', 'yaml', 'tree_sitter', 'harness.doctor.rules') if m in sys.modules]"
    done = subprocess.run(
        [sys.executable, "-c", f"import sys, harness.doctor.cli; print({heavy})"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "[]\n"


def test_the_doctor_never_imports_engines_or_torch(script: Path) -> None:
    import subprocess
    import sys

    code = (
        "import sys\nfrom pathlib import Path\nfrom harness.doctor.diagnose import diagnose\n"
        "from harness.doctor.settings import DoctorSettings\n"
        f"diagnose([Path({str(script.parent)!r})], DoctorSettings())\n"
        "print([m for m in sys.modules if m.split('.')[0] in ('torch', 'numpy', 'vllm', 'engines', 'reports')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
