"""A matrix: a named set of cells, found by name or path and read whole.

It does not know engines. Rules: an existing path wins over a shipped name, and the path used is kept; cells keep the
order of their files' names, those of included matrices follow in the order of `include`; a name occurs once.

A folder holds one cell per `*.toml`; an optional `matrix.toml` gives `description`, `include` (other matrices) and
`allow_unsupported` (cells whose UNSUPPORTED is foreseen). A single file holds one cell, or several under `[[cells]]`.
An included matrix lies beside the one that includes it, or is a shipped one; where the command runs does not matter.
One that several include is taken once.
"""

from __future__ import annotations

import hashlib
import importlib.util
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.cell import SCHEMA, Cell, parse_cell
from harness.errors import CellError
from harness.reader import Reader, shown
from harness.suggest import did_you_mean


@dataclass(frozen=True, slots=True, kw_only=True)
class Matrix:
    """Cells with where they came from. `digest` is the SHA-256 over the files, in order.

    `left_out` names cells that the matrix has and somebody chose not to run.
    """

    name: str
    path: Path
    cells: tuple[Cell, ...]
    allow_unsupported: tuple[str, ...]
    digest: str
    left_out: tuple[str, ...] = ()


def shipped_folder() -> Path:
    """The `cells` package that lies beside `harness`."""
    spec = importlib.util.find_spec("cells")
    beside = Path(__file__).resolve().parent.parent / "cells"
    if spec is None or spec.origin is None or Path(spec.origin).resolve().parent != beside:
        found = spec.origin if spec else "nothing"
        raise CellError(
            f"package 'cells': expected the one beside samebits' harness ({beside}), found {found}; "
            "rename the folder that shadows it or run from another directory"
        )
    return beside


def shipped_names() -> tuple[str, ...]:
    """Names of the shipped matrices, sorted."""
    entries = sorted(shipped_folder().iterdir())
    return tuple(e.stem for e in entries if e.suffix == ".toml" or (e / "matrix.toml").exists())


def find_matrix(name_or_path: str) -> Path:
    """The folder or file a name stands for. Raises CellError with the names that exist."""
    path = Path(name_or_path)
    if path.exists():
        return path
    shipped = shipped_folder()
    for candidate in (shipped / name_or_path, shipped / f"{name_or_path}.toml"):
        if candidate.exists() and candidate.parent == shipped:
            return candidate
    hint = did_you_mean(name_or_path, shipped_names())
    raise CellError(f"matrix {name_or_path!r}: no such path or shipped matrix; {hint}")


def load_matrix(name_or_path: str) -> Matrix:
    """Reads every cell of a matrix. Raises CellError listing all mistakes of all files."""
    path = find_matrix(name_or_path)
    return _load(path, within=(), taken=set())


def matrix_parts(path: Path) -> tuple[tuple[Path, ...], tuple[str, ...]]:
    """(where a matrix and all it includes lie, cells whose UNSUPPORTED they foresee), without reading a cell.

    Raises CellError.
    """
    places: list[Path] = []
    allow: list[str] = []
    _gather(path, (), places, allow)
    return tuple(places), tuple(allow)


def _gather(path: Path, within: tuple[Path, ...], places: list[Path], allow: list[str]) -> None:
    if path.resolve() in [place.resolve() for place in places]:
        return
    places.append(path)
    header = path / "matrix.toml"
    if not header.is_file():
        return
    mistakes: list[str] = []
    document = _parse_toml(header, _read_bytes(header), mistakes)
    include, foreseen = ((), ()) if document is None else _read_header(header, document, mistakes)
    if mistakes:
        raise CellError("\n".join(mistakes))
    allow += foreseen
    for place in _included(path, include, (*within, path)):
        _gather(place, (*within, path), places, allow)


def _load(path: Path, within: tuple[Path, ...], taken: set[Path]) -> Matrix:
    """`within` are the matrices that include this one; the resolved paths in `taken` are not included again."""
    header = path / "matrix.toml"
    files = sorted(path.glob("*.toml")) if path.is_dir() else [path]
    hasher = hashlib.sha256()
    mistakes: list[str] = []
    cells: list[Cell] = []
    include: tuple[str, ...] = ()
    allow: tuple[str, ...] = ()
    for file in files:
        content = _read_bytes(file)
        hasher.update(hashlib.sha256(content).digest())
        document = _parse_toml(file, content, mistakes)
        if document is None:
            continue
        if file == header:
            include, allow = _read_header(file, document, mistakes)
        else:
            cells += _read_cells(file, document, mistakes)
    if mistakes:
        raise CellError("\n".join(mistakes))
    for place in _included(path, include, (*within, path)):
        if place.resolve() in taken:
            continue
        taken.add(place.resolve())
        other = _load(place, (*within, path), taken)
        cells += other.cells
        allow += other.allow_unsupported
        hasher.update(bytes.fromhex(other.digest))
    if within and not cells:  # whatever it includes was taken already
        return Matrix(name=path.stem, path=path, cells=(), allow_unsupported=(), digest=hasher.hexdigest())
    check_names(path, cells, allow)
    return Matrix(name=path.stem, path=path, cells=tuple(cells), allow_unsupported=allow, digest=hasher.hexdigest())


def _included(path: Path, names: Sequence[str], within: Sequence[Path]) -> list[Path]:
    """Where included matrices lie. Raises CellError naming all that are unknown, listed twice, or lead back here."""
    places: list[Path] = []
    mistakes: list[str] = []
    for index, name in enumerate(names):
        place = _beside(path, name)
        if place is None:
            mistakes.append(f"$.include[{index}]: no matrix {name!r} beside this one or shipped; "
                            f"{did_you_mean(name, shipped_names())}")  # fmt: skip
        elif place.resolve() in [one.resolve() for one in within]:
            through = " -> ".join(str(one) for one in (*within, place))
            mistakes.append(f"$.include[{index}]: {name!r} includes itself: {through}")
        elif place.resolve() in [one.resolve() for one in places]:
            mistakes.append(f"$.include[{index}]: {name!r} is listed twice")
        else:
            places.append(place)
    if mistakes:
        raise CellError("\n".join(f"{path / 'matrix.toml'}: {mistake}" for mistake in mistakes))
    return places


def _beside(path: Path, name: str) -> Path | None:
    shipped = shipped_folder()
    candidates = (path.parent / name, path.parent / f"{name}.toml", shipped / name, shipped / f"{name}.toml")
    return next((candidate for candidate in candidates if candidate.exists()), None)


def _read_bytes(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise CellError(f"{file}: expected a readable TOML file: {error.strerror}") from error


def _parse_toml(file: Path, content: bytes, mistakes: list[str]) -> Mapping[str, object] | None:
    try:
        document = tomllib.loads(content.decode("utf-8"))
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        mistakes.append(f"{file}: not TOML: {error}")
        return None
    message = schema_mistake(document.get("schema"), SCHEMA)
    if message:
        mistakes.append(f"{file}: $.schema: {message}")
        return None
    return document


def schema_mistake(found: object, expected: int) -> str | None:
    """What is wrong with a schema number: three sentences for missing, old and new; None when it is right."""
    if found is None:
        return f"missing; write `schema = {expected}`"
    if type(found) is not int:
        return f"expected the integer {expected}, got {shown(found)}"
    if found < expected:
        return f"{found} is older than {expected}, which this version reads; update the file"
    if found > expected:
        return f"{found} is newer than {expected}; install a newer samebits"
    return None


def _read_header(
    file: Path, document: Mapping[str, object], mistakes: list[str]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    reader = Reader(document)
    reader.raw("schema")
    reader.take("description", str, None)
    include, allow = reader.strings("include"), reader.strings("allow_unsupported")
    reader.close()
    mistakes += [f"{file}: {mistake}" for mistake in reader.mistakes]
    return include, allow


def _read_cells(file: Path, document: Mapping[str, object], mistakes: list[str]) -> list[Cell]:
    tables = document.get("cells")
    if tables is None:
        body = {key: value for key, value in document.items() if key != "schema"}
        places: list[tuple[str, object]] = [("$", body)]
    elif isinstance(tables, list) and set(document) <= {"schema", "cells", "description"}:
        places = [(f"$.cells[{index}]", table) for index, table in enumerate(tables)]
    else:
        mistakes.append(f"{file}: $: expected `schema`, `description` and a list `[[cells]]`, nothing else beside them")
        return []
    cells = []
    for place, table in places:
        if not isinstance(table, Mapping):
            mistakes.append(f"{file}: {place}: expected a table, got {shown(table)}")
            continue
        cell, found = parse_cell(table, place)
        mistakes += [f"{file}: {mistake}" for mistake in found]
        cells += [cell] if cell else []
    return cells


def check_names(path: Path, cells: Sequence[Cell], allow: Sequence[str]) -> None:
    """Raises CellError when there is no cell, a name twice, or an allowed name that is no cell."""
    names = [cell.name for cell in cells]
    if not names:
        raise CellError(f"{path}: no cells; a matrix holds at least one cell file")
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise CellError(f"{path}: cell names must be unique; twice: {', '.join(twice)}")
    for name in allow:
        if name not in names:
            raise CellError(f"{path}: $.allow_unsupported: no cell {name!r}; {did_you_mean(name, names)}")
