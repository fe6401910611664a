"""The page's table is the rules; the seed story reports exactly the half that is missing."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.doctor.diagnose import diagnose
from harness.doctor.rule_table import render_rules, replace_table
from harness.doctor.rules import RULES
from harness.doctor.settings import DoctorSettings

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "doctor.md"


def test_table_of_rules_is_up_to_date() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert replace_table(text) == text, "run: python -m harness.doctor.rule_table docs/doctor.md"
    for rule in RULES:
        assert f"| `{rule.id}` |" in text


def test_a_page_without_marks_is_refused() -> None:
    with pytest.raises(ValueError, match="the page has no"):
        replace_table("# nothing here")


def test_rules_are_complete_and_unique() -> None:
    assert len({rule.id for rule in RULES}) == len(RULES)
    for rule in RULES:
        assert rule.title, rule.id
        assert rule.why.endswith("."), rule.id
        assert rule.mend.endswith("."), rule.id
    assert render_rules().count("\n") > len(RULES)


def test_seed_story_reports_exactly_the_missing_half(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    folder = Path("docs/examples/two-and-a-half-of-three")
    found = [
        (item.rule, Path(item.place.path).name, item.place.line)
        for item in diagnose([folder], DoctorSettings()).findings
    ]
    assert found == [
        ("flag-conditional", "launch.py", 13),
        ("flag-overridable", "launch.py", 13),
        ("deepinfer-mtp-varlen", "launch.py", 27),
    ]
    readme = (folder / "README.md").read_text(encoding="utf-8")
    for rule, name, line in found:
        assert f"`{rule}`" in readme
        assert f"`{name}:{line}`" in readme


def test_seed_story_mended_is_clean(tmp_path: Path) -> None:
    for file in (ROOT / "docs/examples/two-and-a-half-of-three").iterdir():
        text = file.read_text(encoding="utf-8")
        text = text.replace(
            "    if torch.cuda.is_available():\n        os.environ.setdefault(", "    os.environ.update("
        )
        text = text.replace(
            '"DEEPINFER_BATCH_INVARIANT", "1"', 'DEEPINFER_BATCH_INVARIANT="1", DEEPINFER_ENABLE_MTP_VARLEN="0"'
        )
        (tmp_path / file.name).write_text(text, encoding="utf-8")
    result = diagnose([tmp_path], DoctorSettings())
    assert result.findings == ()
    assert [launch.engine for launch in result.launches] == ["deepinfer"]
