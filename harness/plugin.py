"""The pytest plugin: `pytest -m matrix` runs cells as tests. The composition root together with the command line.

It imports neither pytest's internals nor an engine at load time. Rules: without `-m matrix` (or a cell file as an
argument) nothing of it is collected; paths that are given are collected, and `--samebits-matrix` adds to them; every
planned pair that remains after deselection is judged or the session fails, and so does one in which nothing passed;
UNSUPPORTED is a skip with its reason where `[requires]` or the matrix foresees it; everything else but PASS and
APPROVED (or an expected verdict) is a failure.

Without xdist the first item runs the whole remaining plan, so that cells share engine processes. Under xdist each
worker runs what its item needs, one worker at a time, and finds what others have captured in the session's folder.
"""

from __future__ import annotations

import secrets
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import pytest

from harness import registry
from harness.errors import SamebitsError

if TYPE_CHECKING:
    from harness.plan import Pair, Plan
    from harness.verdict import Verdict


class Node(Protocol):
    """What is used of an xdist worker's controller."""

    workerinput: dict[str, object]


MARK = "matrix"
SESSION = "samebits_session"
PLANNED, JUDGED, PASSED = "samebits_planned", "samebits_judged", "samebits_passed"
KEY = pytest.StashKey["MatrixSession"]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Options of the matrix; all have defaults."""
    group = parser.getgroup("samebits", "samebits: the reproducibility matrix (with -m matrix)")
    group.addoption("--samebits-matrix", action="append", default=None, metavar="MATRIX_OR_PATH",
                    help="matrix to collect with -m matrix; repeatable (default: quick)")  # fmt: skip
    group.addoption("--samebits-engine", default="bundled", metavar="NAME", help="engine to drive")
    group.addoption("--samebits-model", default=None, metavar="MODEL", help="model (default: the engine's first)")
    group.addoption("--samebits-set", action="append", default=[], metavar="KEY=VALUE", help="engine setting")
    group.addoption("--samebits-out", default=None, metavar="DIR", help="folder for captures and report")


def pytest_configure(config: pytest.Config) -> None:
    """Registers the marker and, when the matrix is asked for, adds its path to what is collected."""
    config.addinivalue_line("markers", f"{MARK}: a cell of the reproducibility matrix; runs an engine")
    if config.pluginmanager.hasplugin("xdist") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(XdistHooks(config), "samebits-xdist")
    if not _asked_for(config):
        return
    matrices = config.getoption("samebits_matrix")
    given = config.args if config.args_source is pytest.Config.ArgsSource.ARGS else []
    from harness.matrix import find_matrix, matrix_parts

    try:
        parts = [matrix_parts(find_matrix(name)) for name in matrices or ([] if given else ["quick"])]
    except SamebitsError as error:
        raise pytest.UsageError(str(error)) from error
    known = [Path(argument).resolve() for argument in given]
    paths = dict.fromkeys(place.resolve() for places, _ in parts for place in places)
    config.args = [*given, *(str(path) for path in paths if path not in known)]


def _asked_for(config: pytest.Config) -> bool:
    expression = str(config.getoption("markexpr", "") or "")
    return MARK in expression.replace("(", " ").replace(")", " ").split() and f"not {MARK}" not in expression


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    """A cell file becomes a collector when the matrix is asked for."""
    if file_path.suffix != ".toml" or file_path.name in ("pyproject.toml", "matrix.toml"):
        return None
    if not _is_chosen(file_path, parent.config):
        return None
    return CellFile.from_parent(parent, path=file_path)


def _is_chosen(file_path: Path, config: pytest.Config) -> bool:
    given = [Path(argument.partition("::")[0]).resolve() for argument in config.args]
    named = any(path == file_path for path in given)
    return named or (_asked_for(config) and any(path in file_path.parents for path in given))


class CellFile(pytest.File):
    """One cell file; its items are (cell, variant) pairs."""

    def collect(self) -> Iterator[pytest.Item]:
        """Items named like `max-num-seqs[1-8]`."""
        session = MatrixSession.of(self.config)
        for pair in session.pairs_of(self.path):
            yield CellItem.from_parent(self, name=pair.label, pair=pair)


class CellItem(pytest.Item):
    """One pair as a test."""

    pair: Pair

    def __init__(self, *, pair: Pair, **kwargs: object) -> None:
        super().__init__(**kwargs)  # type: ignore[arg-type]
        self.pair = pair
        self.add_marker(MARK)

    @property
    def key(self) -> str:
        """The pair's name across files."""
        return f"{self.path}::{self.pair.label}"

    def runtest(self) -> None:
        """Captures what is missing, judges, and passes, skips or fails."""
        from harness.verdict import VerdictName

        session = MatrixSession.of(self.config)
        verdict = session.judged(self.path, self.pair.label)
        session.judged_keys.add(self.key)
        if verdict.verdict is VerdictName.UNSUPPORTED:
            if verdict.foreseen or session.is_foreseen(self.path, verdict.cell):
                pytest.skip(f"UNSUPPORTED: {verdict.reason}")
            raise CellFailed(
                f"UNSUPPORTED, and neither [requires] nor the matrix's allow_unsupported foresees it: {verdict.reason}"
            )
        if verdict.expected is None and verdict.verdict not in (VerdictName.PASS, VerdictName.APPROVED):
            raise CellFailed(session.failure_text(self.path, self.pair.label))
        session.passed_keys.add(self.key)

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: object = None) -> str:  # noqa: ARG002
        """Five lines for a failed cell, one message for an error of use."""
        if isinstance(excinfo.value, CellFailed | SamebitsError):
            return str(excinfo.value)
        return str(super().repr_failure(excinfo))

    def reportinfo(self) -> tuple[Path, int | None, str]:
        """Where the item stands."""
        return self.path, None, self.pair.label


class CellFailed(Exception):  # noqa: N818 - the cell failed, nothing went wrong
    """A pair that is not PASS; the text is what pytest prints."""


class MatrixSession:
    """The plans of one pytest session, their captures' folder, and which pairs were judged."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        shared = getattr(config, "workerinput", {})
        self.nonce = str(shared.get(SESSION) or secrets.token_hex(8))
        out = config.getoption("samebits_out")
        self.folder = Path(out) if out else Path(config.rootpath) / ".samebits" / "pytest" / self.nonce
        self.plans: dict[Path, Plan] = {}
        self.verdicts: dict[str, Verdict] = {}
        self.selected: dict[Path, list[str]] = {}
        self.planned: set[str] = set()
        self.judged_keys: set[str] = set()
        self.passed_keys: set[str] = set()

    @property
    def shortcoming(self) -> str:
        """Why the session cannot be green; empty when it can."""
        if self.unjudged:
            return f"{len(self.unjudged)} planned pairs were not judged"
        if self.planned and not self.passed_keys:
            return "nothing passed: every planned pair failed or is UNSUPPORTED here"
        return ""

    @property
    def unjudged(self) -> list[str]:
        """Planned pairs without a verdict, sorted."""
        return sorted(self.planned - self.judged_keys)

    @classmethod
    def of(cls, config: pytest.Config) -> MatrixSession:
        """The session's one instance."""
        if KEY not in config.stash:
            config.stash[KEY] = cls(config)
        return config.stash[KEY]

    def pairs_of(self, file: Path) -> tuple[Pair, ...]:
        """The pairs planned for the cells of one file."""
        return self.plan_of(file).pairs

    def plan_of(self, file: Path) -> Plan:
        """The plan of one cell file. Raises SamebitsError, which fails the collection with its message."""
        if file not in self.plans:
            from harness.choose import choose_plan

            option = self.config.getoption
            try:
                self.plans[file] = choose_plan(
                    [str(file)], engine=option("samebits_engine"), model=option("samebits_model"), mode=None,
                    assignments=option("samebits_set"),
                )  # fmt: skip
            except SamebitsError as error:
                raise pytest.Collector.CollectError(str(error)) from error
        return self.plans[file]

    def is_foreseen(self, file: Path, cell: str) -> bool:
        """Whether the cell's folder, or a matrix that was asked for, allows the cell to be UNSUPPORTED."""
        from harness.matrix import find_matrix, matrix_parts

        asked = [find_matrix(name) for name in self.config.getoption("samebits_matrix") or ()]
        return any(cell in matrix_parts(place)[1] for place in (file.parent, *asked))

    def judged(self, file: Path, label: str) -> Verdict:
        """The verdict of a pair, running what is missing first."""
        key = f"{file}::{label}"
        if key not in self.verdicts:
            wanted = [(file, label)] if self._under_xdist() else self._all_selected()
            self._run(wanted)
        return self.verdicts[key]

    def _all_selected(self) -> list[tuple[Path, str]]:
        return [(file, label) for file, labels in self.selected.items() for label in labels]

    def _under_xdist(self) -> bool:
        return hasattr(self.config, "workerinput")

    def _run(self, wanted: list[tuple[Path, str]]) -> None:
        from filelock import FileLock

        from harness.execute import Executor
        from harness.judge import judge
        from harness.lifetime import DEADLINE_S
        from harness.progress import open_progress
        from harness.run import expected_captures, load_captures

        plan = self._merged(wanted)
        adapter = registry.adapter(plan.engine)
        progress = open_progress(sys.stderr, quiet=self._under_xdist() or self.config.getoption("verbose") < 1)
        self.folder.mkdir(parents=True, exist_ok=True)
        with FileLock(self.folder / "lock"):
            executor = Executor(plan, adapter, self.folder, self.nonce, progress, DEADLINE_S)
            failures = executor.run().failures
        captures, expected = load_captures(plan, executor.store, failures), expected_captures(plan)
        for file, label in wanted:
            pair = next(pair for pair in self.plan_of(file).pairs if pair.label == label)
            self.verdicts[f"{file}::{label}"] = judge(pair, captures, expected)

    def _merged(self, wanted: list[tuple[Path, str]]) -> Plan:
        """One plan over the wanted pairs of several files, so that they share cases and engine processes."""
        import dataclasses

        from harness.stages import order_stages

        parts = [self.plan_of(file).only([label for f, label in wanted if f == file])
                 for file in dict.fromkeys(file for file, _ in wanted)]  # fmt: skip
        cases = {case: plan.cases[case] for plan in parts for case in plan.cases}
        corpora = {key: plan.corpora[key] for plan in parts for key in plan.corpora}
        pairs = tuple(pair for plan in parts for pair in plan.pairs)
        return dataclasses.replace(parts[0], pairs=pairs, cases=cases, stages=order_stages(cases), corpora=corpora)

    def failure_text(self, file: Path, label: str) -> str:
        """Five lines: what differs, where first, how many, size, layer."""
        from harness.record import verdict_record

        plan = self.plan_of(file)
        pair = next(pair for pair in plan.pairs if pair.label == label)
        record = verdict_record(plan, pair, self.verdicts[f"{file}::{label}"])
        return str(registry.load(registry.FIVE_LINES)(record))


def pytest_collection_finish(session: pytest.Session) -> None:
    """The plan is what remains after deselection."""
    cells = [item for item in session.items if isinstance(item, CellItem)]
    if not cells:
        return
    matrix = MatrixSession.of(session.config)
    matrix.selected = {}
    for item in cells:
        matrix.selected.setdefault(item.path, []).append(item.pair.label)
    matrix.planned = {item.key for item in cells}


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fails the session when a planned pair was not judged or nothing passed; an xdist worker only reports."""
    if KEY not in session.config.stash or session.config.getoption("collectonly"):
        return
    matrix = MatrixSession.of(session.config)
    output = getattr(session.config, "workeroutput", None)
    if output is not None:
        output[PLANNED], output[JUDGED] = sorted(matrix.planned), sorted(matrix.judged_keys)
        output[PASSED] = sorted(matrix.passed_keys)
        return
    if matrix.shortcoming and session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Says how much of the plan was judged, and where the captures lie."""
    if KEY not in config.stash or config.getoption("collectonly"):
        return
    matrix = MatrixSession.of(config)
    if not matrix.planned:
        return
    terminalreporter.section("samebits")
    judged = len(matrix.planned & matrix.judged_keys)
    terminalreporter.line(f"{judged} of {len(matrix.planned)} planned pairs judged; captures in {matrix.folder}")
    for key in matrix.unjudged:
        terminalreporter.line(f"planned but not judged: {key}")
    if matrix.shortcoming:
        terminalreporter.line(f"not green: {matrix.shortcoming}")


class XdistHooks:
    """Registered on xdist's controller: hands the session's name down and sums up what the workers judged."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Node) -> None:
        """Gives every worker the same session folder."""
        node.workerinput[SESSION] = MatrixSession.of(self.config).nonce

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Node) -> None:
        """Adds a worker's account; a crashed worker has none, and what it left unjudged stays unjudged."""
        output = getattr(node, "workeroutput", {})
        matrix = MatrixSession.of(self.config)
        matrix.planned |= set(output.get(PLANNED, ()))
        matrix.judged_keys |= set(output.get(JUDGED, ()))
        matrix.passed_keys |= set(output.get(PASSED, ()))
