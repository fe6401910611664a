"""The table of rules for docs/doctor.md, made from the rules themselves."""

from __future__ import annotations

from harness.doctor.finding import Rule
from harness.doctor.rules import RULES
from harness.doctor.variables import VARIABLES, Variable

BEGIN = "<!-- rules: begin (made by `python -m harness.doctor.rule_table docs/doctor.md`) -->"
END = "<!-- rules: end -->"


def render_rules(rules: tuple[Rule, ...] = RULES) -> str:
    """The rules as a Markdown table, and the known variables as another."""
    rows = [
        "| rule | engine | severity | what it finds | why it matters | mend | facts |",
        "|---|---|---|---|---|---|---|",
        *(_row(rule) for rule in rules),
        "",
        "Variables the doctor knows:",
        "",
        "| variable | engine | meaning | the promise needs | what the engine does with it |",
        "|---|---|---|---|---|",
        *(_variable_row(VARIABLES[name]) for name in sorted(VARIABLES)),
    ]
    return "\n".join(rows)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ") or "—"


def _row(rule: Rule) -> str:
    words = (rule.engine, rule.severity.value, rule.title, rule.why, rule.mend, rule.facts)
    return f"| `{rule.id}` | " + " | ".join(_cell(word) for word in words) + " |"


def _variable_row(variable: Variable) -> str:
    want = f"`{variable.want}`" if variable.want else "—"
    cells = (variable.engine, variable.meaning, want, variable.facts)
    return f"| `{variable.name}` | " + " | ".join(_cell(cell) for cell in cells) + " |"


def replace_table(page: str) -> str:
    """The page with the table between its marks made anew. Raises ValueError when the marks are missing."""
    head, begin, rest = page.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the page has no `{BEGIN}` … `{END}`")
    return f"{head}{BEGIN}\n\n{render_rules()}\n\n{END}{tail}"


def main(arguments: list[str]) -> int:
    """Rewrites the page named on the command line."""
    from pathlib import Path

    page = Path(arguments[0])
    page.write_text(replace_table(page.read_text(encoding="utf-8")), encoding="utf-8")
    return 0


if __name__ == "__main__":
    import sys

    sys.exit(main(sys.argv[1:]))
