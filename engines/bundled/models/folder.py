"""A Hugging Face folder as a model: config.json, *.safetensors, tokenizer.json.

It knows file names, not tensors' meaning. Rules: weights come from safetensors alone; a sharded model is read
by its index and every shard must be there; the digest is over the weights in float32, remembered while the
files stay as they are.
"""

from __future__ import annotations

import json
from pathlib import Path

from engines.bundled.config import Model, ModelConfig
from engines.bundled.errors import ModelError
from engines.bundled.models.cache import remembered
from engines.bundled.models.config_file import Json, parse_config
from engines.bundled.models.digest import model_digest
from engines.bundled.models.safetensors_file import StoredTensors, read_header, read_tensors
from engines.bundled.models.source import Origin
from engines.bundled.models.tensors import choose_tensors
from engines.bundled.tokenizer import FileTokenizer

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


class FolderSource:
    """A folder with config.json, safetensors and tokenizer.json."""

    def __init__(self, folder: Path, name: str) -> None:
        """`name` is what the fingerprint calls the model: no path of this machine."""
        self.folder = folder
        self.name = name

    def config(self) -> ModelConfig:
        """Its shape, from config.json and generation_config.json. Raises ModelError."""
        path = self.folder / "config.json"
        generation = self.folder / "generation_config.json"
        return parse_config(str(path), read_json(path), read_json(generation) if generation.is_file() else {})

    def tokenizer(self) -> FileTokenizer:
        """Its tokenizer. Raises ModelError."""
        return FileTokenizer(self.folder)

    def model(self) -> Model:
        """Its weights in float32. Raises ModelError."""
        config, weights = self.config(), self.read_weights()
        digest = remembered("model-digest", self._identity_files(), lambda: model_digest(config, weights))
        return Model(name=self.name, config=config, weights=weights, digest=digest)

    def origin(self) -> Origin:
        """The tensor types its files hold."""
        kinds = {entry.dtype for path in self.weight_files() for entry in read_header(path).values()}
        return Origin(kind="folder", quantisation="+".join(sorted(kinds)))

    def read_weights(self) -> StoredTensors:
        """The tensors the model uses, read when asked for. Raises ModelError."""
        tensors = read_tensors(*self.weight_files())
        return tensors.only(choose_tensors(str(self.folder), self.config(), tensors.shapes()))

    def weight_files(self) -> list[Path]:
        """The safetensors files in order. Raises ModelError if there are none, or a shard of the index is missing."""
        index = self.folder / INDEX
        files = _files_of_index(index) if index.is_file() else sorted(self.folder.glob("*.safetensors"))
        missing = [path.name for path in files if not path.is_file()]
        if missing or not files:
            what = f"{missing[0]}, which {INDEX} names," if missing else "a *.safetensors file"
            msg = f"{self.folder}: expected {what} there, found none; weights are read from safetensors only"
            raise ModelError(msg)
        return files

    def _identity_files(self) -> list[Path]:
        config = [self.folder / name for name in ("config.json", "generation_config.json")]
        return [path for path in (*config, *self.weight_files()) if path.is_file()]


def read_json(path: Path) -> Json:
    """A JSON object from a file. Raises ModelError."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        msg = f"{path}: expected a readable JSON file ({error})"
        raise ModelError(msg) from error
    if not isinstance(value, dict):
        msg = f"{path}: expected a JSON object, got {type(value).__name__}"
        raise ModelError(msg)
    return value


def _files_of_index(index: Path) -> list[Path]:
    shards = read_json(index).get("weight_map")
    if not isinstance(shards, dict) or not shards:
        msg = f"{index}: expected an object 'weight_map' from tensor to file"
        raise ModelError(msg)
    return [index.parent / name for name in sorted(set(shards.values()))]
