"""From what was asked for (names of matrices, engine, model, settings) to a plan. Starts nothing."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence

from harness import registry
from harness.errors import UsageError
from harness.matrix import Matrix, check_names, load_matrix
from harness.plan import Plan, Subject, make_plan
from harness.settings import mode_settings, parse_assignments
from harness.suggest import did_you_mean


def choose_plan(
    matrices: Sequence[str],
    *,
    engine: str,
    model: str | None,
    mode: str | None,
    assignments: Sequence[str],
    cells: Sequence[str] = (),
) -> Plan:
    """Loads, joins and filters the matrices and plans them. Raises UsageError for anything that cannot be used."""
    adapter = registry.adapter(engine)
    overrides = dict(mode_settings(adapter, mode, "--mode")) if mode is not None else {}
    overrides.update(parse_assignments(adapter, assignments))
    matrix = only_cells(join([load_matrix(name) for name in matrices]), cells)
    chosen = model if model is not None else default_model(engine)
    return make_plan(matrix, Subject(adapter=adapter, model=chosen, overrides=overrides))


def default_model(engine: str) -> str:
    """The first model the engine lists."""
    models = registry.adapter(engine).models()
    if not models:
        raise UsageError(f"--model: engine {engine!r} lists no model; name one")
    return models[0].name


def join(matrices: Sequence[Matrix]) -> Matrix:
    """One matrix out of several, in their order."""
    if len(matrices) == 1:
        return matrices[0]
    joined = Matrix(
        name="+".join(matrix.name for matrix in matrices),
        path=matrices[0].path,
        cells=tuple(cell for matrix in matrices for cell in matrix.cells),
        allow_unsupported=tuple(name for matrix in matrices for name in matrix.allow_unsupported),
        digest=hashlib.sha256("".join(matrix.digest for matrix in matrices).encode()).hexdigest(),
    )
    check_names(joined.path, joined.cells, joined.allow_unsupported)
    return joined


def only_cells(matrix: Matrix, names: Sequence[str]) -> Matrix:
    """The named cells of a matrix, which still says what was left out; all when none is named.

    Raises UsageError for an unknown name.
    """
    if not names:
        return matrix
    known = [cell.name for cell in matrix.cells]
    for name in names:
        if name not in known:
            raise UsageError(f"--cell {name!r}: matrix {matrix.name!r} has no such cell; {did_you_mean(name, known)}")
    cells = tuple(cell for cell in matrix.cells if cell.name in names)
    allow = tuple(name for name in matrix.allow_unsupported if name in names)
    left_out = tuple(cell.name for cell in matrix.cells if cell.name not in names)
    return dataclasses.replace(matrix, cells=cells, allow_unsupported=allow, left_out=left_out)
