"""The command `fingerprint`: prints this host's fields, an engine's beside them, and compares saved files.

It does not know engines: what an engine adds comes from a callable passed in. Rules: exit code 0 when
nothing that may matter differs, 1 for identity or lineage differences, 2 for files that cannot be read;
context is shown and never decides.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import click

from harness.engine import Field, FieldClass
from harness.errors import OutputError, StoreError, UsageError
from harness.fingerprint import CLASSES, Fingerprint, diff, fingerprint_of
from harness.fingerprint.host import host_fields
from harness.fingerprint.variables import NOT_SET

Subject = Callable[[str, str], tuple[Field, ...]]  # (engine, model) to the fields of the engine's process

_MEANING: dict[FieldClass, str] = {
    "identity": "must match for equal bits to be expected at all",
    "lineage": "history: recorded, compared, never voids a verdict",
    "context": "recorded, never compared",
}


def build_command(subject: Subject | None = None) -> click.Group:
    """The `fingerprint` command. `subject` starts an engine with a model and returns its process's fields."""

    @click.group("fingerprint", invoke_without_command=True)
    @click.option("--engine", metavar="NAME", help="Start this engine and show its process's fields (with --model).")
    @click.option("--model", metavar="NAME", help="The model the engine loads.")
    @click.option(
        "--weights",
        type=click.Path(exists=True, path_type=Path),
        metavar="PATH",
        help="Add digests of a model's files: a folder, or one weight file.",
    )
    @click.option("--recheck", is_flag=True, help="With --weights: read every byte, whatever is remembered.")
    @click.option("--json", "as_json", is_flag=True, help="Print JSON, as `fingerprint diff` reads it.")
    @click.option("--out", type=click.Path(path_type=Path), metavar="FILE", help="Write the JSON to FILE.")
    @click.pass_context
    def fingerprint(
        context: click.Context, engine: str | None, model: str | None, weights: Path | None, recheck: bool,
        as_json: bool, out: Path | None,
    ) -> None:  # fmt: skip
        """Show what it takes to reproduce the exact inference path on this host."""
        if context.invoked_subcommand is None:
            gathered = _with_files(_gather(subject, engine, model), weights, recheck=recheck)
            _show(gathered, as_json=as_json, out=out)

    fingerprint.add_command(_diff_command)
    return fingerprint


@click.command("diff")
@click.argument("a", type=click.Path(path_type=Path))
@click.argument("b", type=click.Path(path_type=Path))
@click.pass_context
def _diff_command(context: click.Context, a: Path, b: Path) -> None:
    """Compare two saved fingerprints, worst class first."""
    differences = diff(load_fingerprint(a), load_fingerprint(b))
    for difference in differences:
        click.echo(f"{difference.field_class:<9} {difference.describe()}")
    decisive = [difference for difference in differences if difference.field_class != "context"]
    click.echo(_conclusion(len(decisive), len(differences) - len(decisive)))
    context.exit(1 if decisive else 0)


def load_fingerprint(path: Path) -> Fingerprint:
    """Reads a file that `fingerprint --out` wrote.

    Raises:
        StoreError: unreadable, no JSON, or not a fingerprint; the message begins with the path.
    """
    try:
        return Fingerprint.from_json(json.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise StoreError(f"{path}: cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise StoreError(f"{path}: expected a fingerprint in JSON, found {error}") from error
    except StoreError as error:
        raise StoreError(f"{path}: {error}") from error


def save_fingerprint(fingerprint: Fingerprint, path: Path) -> None:
    """Writes the JSON form. Raises OutputError."""
    try:
        path.write_text(_json(fingerprint) + "\n", encoding="utf-8")
    except OSError as error:
        raise OutputError(f"{path}: cannot be written ({error.strerror}); choose another --out") from error


def _gather(subject: Subject | None, engine: str | None, model: str | None) -> Fingerprint:
    host = host_fields(os.environ, now=datetime.now(UTC))
    if engine is None and model is None:
        return fingerprint_of(host)
    if engine is None or model is None:
        raise UsageError("fingerprint: --engine and --model go together; give both, or neither for the host alone")
    if subject is None:
        raise UsageError("fingerprint: this command line was built without engines; leave out --engine")
    fields = subject(engine, model)
    told = {field.name for field in fields}  # the engine's process may describe its host itself
    return fingerprint_of(fields, (field for field in host if field.name not in told))


def _with_files(fingerprint: Fingerprint, weights: Path | None, *, recheck: bool) -> Fingerprint:
    """The fingerprint with the digests of a model's files; an engine's own word about the model stays."""
    if weights is None:
        return fingerprint
    from harness.fingerprint.file_digests import FileDigests
    from harness.fingerprint.model_files import model_fields

    told = {field.name for field in fingerprint.fields}
    added = (field for field in model_fields(weights, FileDigests(recheck=recheck)) if field.name not in told)
    return fingerprint_of(fingerprint.fields, added)


def _show(fingerprint: Fingerprint, *, as_json: bool, out: Path | None) -> None:
    if out is not None:
        save_fingerprint(fingerprint, out)
        click.echo(f"{fingerprint.digest}  {out}")
    elif as_json:
        click.echo(_json(fingerprint))
    else:
        _print_sections(fingerprint)


def _print_sections(fingerprint: Fingerprint) -> None:
    unset = [field for field in fingerprint.fields if field.name.startswith("env.") and field.value == NOT_SET]
    for field_class in CLASSES:
        click.echo(f"{field_class}: {_MEANING[field_class]}")
        for field in fingerprint.fields:
            if field.field_class == field_class and field not in unset:
                click.echo(f"  {field.name:<26} {field.source if field.value is None else field.value}")
    click.echo(f"{len(unset)} more environment variables that can move a bit are not set (--json lists them)")
    click.echo(f"identity digest {fingerprint.digest}")


def _json(fingerprint: Fingerprint) -> str:
    return json.dumps(fingerprint.to_json(), indent=2, ensure_ascii=False)


def _conclusion(decisive: int, context: int) -> str:
    beside = f" ({context} of context, never compared)" if context else ""
    if decisive:
        return f"{decisive} {'field differs' if decisive == 1 else 'fields differ'}{beside}"
    return f"no identity or lineage field differs{beside}"
