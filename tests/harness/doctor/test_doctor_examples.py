"""Every written example: the doctor finds exactly what the example says, nothing more and nothing less."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from harness.doctor.diagnose import diagnose
from harness.doctor.rules import RULES
from harness.doctor.settings import DoctorSettings

EXAMPLES = Path(__file__).parent / "examples"
_HEAD = re.compile(r"##### (bad|good) ([a-z0-9-]+): (.+)")


@dataclass
class Example:
    """Files by name, and the (rule, path, line) triples that must be found."""

    verdict: str
    rule: str
    title: str
    files: dict[str, list[str]] = field(default_factory=dict)
    expected: list[tuple[str, str, int]] = field(default_factory=list)

    @property
    def name(self) -> str:
        return re.sub(r"[^a-z0-9]+", "-", f"{self.verdict}-{self.rule}-{self.title}".lower()).strip("-")


def parse_bundle(text: str) -> list[Example]:
    """Examples of one bundle: `#####` heads, `---` files, `>>>` expectations."""
    examples: list[Example] = []
    current: list[str] | None = None
    for line in text.splitlines():
        if line.startswith("##### "):
            match = _HEAD.fullmatch(line)
            assert match, line
            examples.append(Example(*match.groups()))
            current = None
        elif line.startswith("--- "):
            current = examples[-1].files.setdefault(line[4:], [])
        elif line.startswith(">>> "):
            rule, place = line[4:].split()
            path, number = place.rsplit(":", 1)
            examples[-1].expected.append((rule, path, int(number)))
            current = None
        elif current is not None:
            current.append(line)
    return examples


ALL = [example for bundle in sorted(EXAMPLES.glob("*.txt")) for example in parse_bundle(bundle.read_text())]


def write_example(example: Example, folder: Path) -> None:
    for name, lines in example.files.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("\n".join(lines).rstrip("\n") + "\n")


@pytest.mark.parametrize("example", ALL, ids=[example.name for example in ALL])
def test_example_is_judged_exactly(example: Example, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_example(example, tmp_path)
    monkeypatch.chdir(tmp_path)
    result = diagnose([Path()], DoctorSettings())
    found = Counter((item.rule, item.place.path, item.place.line) for item in result.findings)
    assert found == Counter(example.expected), [
        f"{item.place.path}:{item.place.line} {item.rule}: {item.message}" for item in result.findings
    ]
    assert result.files == len(example.files)


def test_every_rule_has_two_bad_and_two_good_examples() -> None:
    bad, good = Counter(), Counter()
    for example in ALL:
        (bad if example.verdict == "bad" else good)[example.rule] += 1
    short = [rule.id for rule in RULES if rule.id != "live-differs" and (bad[rule.id] < 2 or good[rule.id] < 2)]
    assert short == []


def test_examples_name_rules_and_mean_what_they_say() -> None:
    known = {rule.id for rule in RULES}
    for example in ALL:
        assert example.rule in known, example.rule
        rules = {rule for rule, _, _ in example.expected}
        assert rules <= known
        assert (example.rule in rules) == (example.verdict == "bad"), example.name
    assert len(ALL) >= 120
    assert len({example.name for example in ALL}) == len(ALL)
