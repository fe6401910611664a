"""Hostile input: nothing crashes, hangs, executes or opens a device; what cannot be read is said."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from harness.doctor.diagnose import Diagnosis, diagnose
from harness.doctor.settings import DoctorSettings
from harness.doctor.source import MAX_BYTES
from harness.errors import UsageError

DEEP = 20_000


def look(folder: Path) -> Diagnosis:
    return diagnose([folder], DoctorSettings())


def rules(result: Diagnosis) -> set[str]:
    return {finding.rule for finding in result.findings}


HOSTILE = {
    "parentheses.py": "x = " + "(" * DEEP,
    "lists.py": "x = " + "[" * 500 + "]" * 500,
    "unary.py": "x = " + "-" * DEEP + "1",
    "attributes.py": "import os\nos.environ\nx = a" + ".b" * DEEP,
    "calls.py": "import os\nos.environ\nx = f" + "()" * DEEP,
    "additions.py": "import os\nos.environ\nx = " + "+".join("1" for _ in range(DEEP)),
    "number.py": "x = " + "1" * 10_000,
    "elifs.py": "import os\nos.environ\nif a:\n  pass\n" + "elif b:\n  pass\n" * 5_000,
    "surrogate.py": 'import os\nos.environ["VLLM_BATCH_INVARIANT"] = "\\ud800"\n',
    "braces.sh": "{ " * DEEP,
    "substitutions.sh": "$(" * DEEP,
    "expansions.sh": "${a:-" * DEEP,
    "ifs.sh": "if true; then " * DEEP,
    "nested.sh": "if true; then\n" * 400 + "echo\n" + "fi\n" * 400,
    "here.sh": "cat <<A\n" * 2_000,
    "scripts.sh": "bash -c '" + 'bash -c "' * 50 + "vllm serve m" + '"' * 50 + "'\n",
    "wrappers.sh": "env " * DEEP + "vllm serve m\n",
    "assignments.sh": "A=1 " * 5_000 + "vllm serve m\n",
    "mappings.yaml": "{a: " * DEEP,
    "sequences.yaml": "[" * DEEP,
    "indents.yaml": "".join(" " * level + "a:\n" for level in range(1_000)),
    "alias.yaml": "a: &a [*a, *a]\n",
    "tag.yaml": "!!python/object/apply:os.system ['touch executed']\n",
    "merge.yaml": "a: &a {<<: *a}\n",
    "arrays.json": "[" * DEEP,
    "objects.json": '{"a":' * DEEP,
    "unicode.json": '{"a": "\\ud800"}',
    "spaces.json": " " * 500_000,
    "commas.json": "," * 500_000,
    "comments.json": "/*" * 100_000,
    "arrays.toml": "a = " + "[" * DEEP,
    "keys.toml": ".".join("a" for _ in range(DEEP)) + " = 1",
    "number.toml": "a = " + "9" * 10_000,
    "Dockerfile": "FROM a\n" + "RUN a \\\n" * DEEP,
    "Dockerfile.heredoc": "FROM a\nRUN <<EOF\n" + "x\n" * DEEP,
    "unit.service": "[Service]\nExecStart=" + "a \\\n" * DEEP,
    "quote.service": "[Service]\nExecStart='" + "a " * DEEP,
    "long.env": "A=" + "x" * 1_000_000,
    "quotes.env": "A='" * DEEP,
    "lines.jsonl": "{}\n" * DEEP,
    "template.yaml": "a: " + "{{ " * DEEP,
    "actions.yaml": ("a: " + "{{ " * 6_000 + "\n") * 100,
    "closed.yaml": ("}} " + "{{ " * 6_000 + "\n") * 100,
    "blanks.env": "A=x" + " " * 1_000_000 + "y\n",
    "comment.env": "A=x" + " " * 500_000 + "\t" * 500_000 + "y\n",
    "Dockerfile.blanks": "FROM a\nRUN" + " " * 1_000_000 + "x <y\n",
    "options.sh": "vllm serve " + "-a " * 150_000 + "\n",
    "chains.py": "import os\nos.environ\n" + ("if a:\n  pass\n" + "elif b:\n  pass\n" * 150) * 20,
    "templates.yaml": "a: " + "{{ x }}" * DEEP,
}


@pytest.mark.parametrize("name", sorted(HOSTILE))
def test_hostile_text_ends_in_findings_or_silence(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(HOSTILE[name], encoding="utf-8")
    result = look(tmp_path)
    assert result.files == 1
    assert [file.name for file in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize(
    "name", ["parentheses.py", "number.py", "braces.sh", "mappings.yaml", "arrays.json", "arrays.toml", "nested.sh"]
)
def test_what_is_too_deep_is_said(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(HOSTILE[name], encoding="utf-8")
    assert rules(look(tmp_path)) == {"unparsable"}


def test_yaml_bomb_is_followed_by_reference(tmp_path: Path) -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 40)]
    lines.append("services: {llm: {image: 'vllm/vllm-openai:latest', command: *a39, environment: *a39}}")
    (tmp_path / "bomb.yaml").write_text("\n".join(lines))
    assert rules(look(tmp_path)) == {"floating-image", "vllm-flag-missing"}


def test_wide_yaml_bomb_is_bounded(tmp_path: Path) -> None:
    (tmp_path / "wide.yaml").write_text("a: [" + "x, " * 250_000 + "]")
    assert rules(look(tmp_path)) == {"unparsable"}


def test_python_tags_are_not_constructed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tag.yaml").write_text("!!python/object/apply:os.system ['touch executed']\n")
    (tmp_path / "run.sh").write_text("touch executed; x=$(touch executed)\n")
    (tmp_path / "run.py").write_text("import os\nos.environ\nos.system('touch executed')\n")
    look(tmp_path)
    assert not (tmp_path / "executed").exists()


def test_binary_and_utf16_are_said(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_bytes(bytes(range(256)) * 10)
    (tmp_path / "b.sh").write_bytes("export A=1\n".encode("utf-16"))
    (tmp_path / "tool").write_bytes(b"\x7fELF" + bytes(5000))
    result = look(tmp_path)
    assert [(f.place.path[-4:], f.rule) for f in result.findings] == [("a.py", "unparsable"), ("b.sh", "unparsable")]


def test_other_encodings_are_read(tmp_path: Path) -> None:
    (tmp_path / "a.sh").write_bytes(b"# caf\xe9\nexport VLLM_BATCH_INVARIANT=0\n")
    (tmp_path / "b.sh").write_bytes(b"\xef\xbb\xbfexport VLLM_BATCH_INVARIANT=0\n")
    assert [(f.place.line, f.rule) for f in look(tmp_path).findings] == [(2, "flag-false"), (1, "flag-false")]


def test_enormous_file_is_said_and_not_read(tmp_path: Path) -> None:
    with (tmp_path / "big.py").open("wb") as handle:
        handle.truncate(MAX_BYTES + 1)
    (finding,) = look(tmp_path).findings
    assert finding.rule == "unparsable"
    assert "larger than 2 MiB" in finding.message


def test_pipes_and_devices_are_never_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.sh")
    (tmp_path / "zero.py").symlink_to("/dev/zero")
    result = look(tmp_path)
    assert [f.rule for f in result.findings] == ["unparsable", "unparsable"]
    assert all("not a regular file" in f.message for f in result.findings)


def test_symlink_loops_end(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "up").symlink_to(tmp_path)
    (tmp_path / "loop.sh").symlink_to(tmp_path / "loop.sh")
    (tmp_path / "x.sh").write_text("export VLLM_BATCH_INVARIANT=0\n")
    assert [(Path(f.place.path).name, f.rule) for f in look(tmp_path).findings] == [
        ("loop.sh", "unparsable"),
        ("x.sh", "flag-false"),
    ]


def test_unreadable_file_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.sh").write_text("export A=1\n")

    def refuse(self: Path, *args: object, **kwargs: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    (finding,) = look(tmp_path).findings
    assert "Permission denied" in finding.message


def test_missing_path_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="give an existing path"):
        look(tmp_path / "nowhere")


def test_hidden_and_vendored_folders_are_left_alone(tmp_path: Path) -> None:
    for name in (".git", ".venv", "node_modules", "__pycache__"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.sh").write_text("export VLLM_BATCH_INVARIANT=0\n")
    assert look(tmp_path).files == 0


def test_control_characters_do_not_reach_the_terminal(tmp_path: Path) -> None:
    from harness.doctor.render import render_text

    (tmp_path / "a.env").write_text("VLLM_BATCH_INVARIANT='\x1b[31mred\x1b[0m'\n")
    result = look(tmp_path)
    assert "\x1b" not in render_text(result.findings, files=1, launches=0)
    assert result.findings


MANY = {
    "starts.py": "from vllm import LLM\nimport os\n" + 'os.environ["VLLM_BATCH_INVARIANT"] = "1"\nLLM("m")\n' * 700,
    "settings.py": "import os\n" + "".join(f'os.environ["VLLM_BATCH_INV_{n:05}"] = "1"\n' for n in range(6_000)),
    "starts.sh": "export VLLM_BATCH_INVARIANT=1\nA=1 vllm serve m\n" * 700,
    "settings.env": "".join(f"VLLM_BATCH_INV_{n:05}=1\n" for n in range(6_000)),
    "services.yaml": "services:\n"
    + "".join(f"  s{n}: {{image: 'vllm/vllm-openai:v0.26.0', command: m}}\n" for n in range(600)),
    "runs.sh": "python a.py\n" * 700,
}


@pytest.mark.parametrize("name", sorted(MANY))
def test_masses_of_facts_are_cut_off(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(MANY[name])
    (finding,) = look(tmp_path).findings
    assert finding.rule == "unparsable"
    assert "more than" in finding.message
