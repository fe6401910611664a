"""Turns a GGUF file into a Hugging Face folder in the cache, once, and opens it from there.

It does not know tensor types. Rules: the folder is named by the GGUF's SHA-256 and the converter's version
and appears whole; its digest is computed while converting; opening looks at size and time only,
`check_conversion` reads everything again.
"""

from __future__ import annotations

import json
from pathlib import Path

from engines.bundled.config import Model
from engines.bundled.errors import ModelError
from engines.bundled.models.cache import building, cache_folder, file_sha256, remembered
from engines.bundled.models.config_file import config_json
from engines.bundled.models.digest import model_digest
from engines.bundled.models.folder import SINGLE, FolderSource, read_json
from engines.bundled.models.gguf_file import GgufFile
from engines.bundled.models.gguf_tokenizer import write_tokenizer
from engines.bundled.models.safetensors_file import write_tensors
from engines.bundled.models.source import Origin
from engines.bundled.models.tensors import tensor_shapes

SCHEMA = 1
VERSION = 1  # of the conversion; a change that can move a bit or a token id is a new one
NOTE = "conversion.json"


class ConvertedSource(FolderSource):
    """A folder that was converted from a GGUF file."""

    def model(self) -> Model:
        """Its weights, with the digest taken at conversion. Raises ModelError if the file changed since."""
        note, size = read_json(self.folder / NOTE), (self.folder / SINGLE).stat().st_size
        if size != note["weights_bytes"]:
            expected = note["weights_bytes"]
            raise ModelError(f"{self.folder / SINGLE}: expected {expected} bytes, found {size}; delete the folder")
        return Model(name=self.name, config=self.config(), weights=self.read_weights(), digest=str(note["digest"]))

    def origin(self) -> Origin:
        """What the GGUF held."""
        return Origin(kind="gguf", quantisation=str(read_json(self.folder / NOTE)["quantisation"]))


def open_gguf(path: Path, name: str) -> ConvertedSource:
    """The model of a GGUF file, converted if it was not yet. Raises ModelError."""
    if not path.is_file():
        msg = f"{path}: expected a GGUF file there, found none"
        raise ModelError(msg)
    sha256 = remembered("sha256", [path], lambda: file_sha256(path))
    target = cache_folder() / "converted" / f"{sha256[:32]}-v{VERSION}"
    with building(target) as draft:
        if draft is not None:
            _convert(path, sha256, draft)
    return ConvertedSource(target, name)


def check_conversion(source: ConvertedSource) -> None:
    """Reads all weights again. Raises ModelError if they are not what was converted."""
    expected = str(read_json(source.folder / NOTE)["digest"])
    found = model_digest(source.config(), source.read_weights())
    if found != expected:
        msg = f"{source.folder}: expected weights with digest {expected}, found {found}; delete the folder"
        raise ModelError(msg)


def _convert(path: Path, sha256: str, folder: Path) -> None:
    file = GgufFile(path)
    config = file.config()
    write_tokenizer(file, folder)
    write_tensors(folder / SINGLE, tensor_shapes(config), file.weights())
    (folder / "config.json").write_text(json.dumps(config_json(config), indent=1))
    note = {
        "schema": SCHEMA,
        "version": VERSION,
        "gguf_sha256": sha256,
        "quantisation": file.quantisation(),
        "weights_bytes": (folder / SINGLE).stat().st_size,
        "digest": model_digest(config, FolderSource(folder, path.stem).read_weights()),
    }
    (folder / NOTE).write_text(json.dumps(note, indent=1))
