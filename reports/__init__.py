"""Reports of a run: HTML for release review, Markdown for a pull request, JUnit for CI, a terminal table.

They read the record of a run (`run.json`) and nothing else: no captures, no engines. Importing this package
imports no template engine; each report does so when it is written.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path


def make_reports(run: Mapping[str, object], directory: Path) -> None:
    """Writes report.html, summary.md and junit.xml, each whole or not at all.

    Raises:
        StoreError: the record has another schema.
        OutputError: the folder cannot be written (read-only, full disk).
    """
    from reports.html import render_report
    from reports.junit import render_junit
    from reports.summary import summary
    from reports.writing import write_whole

    texts = {"report.html": render_report(run), "summary.md": summary(run), "junit.xml": render_junit(run)}
    for name, text in texts.items():
        write_whole(directory / name, text)
