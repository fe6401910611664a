"""Corpora made by hand for the tests: request JSON that is valid until a test breaks it, and folders of it."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

from harness.corpus.json_lines import request_from_json
from harness.corpus.manifest import TokenizerName, content_digest

VOCAB_SIZE = 512
TOKENIZER = {"name": "hand", "digest": "ab" * 32, "vocab_size": VOCAB_SIZE}
SAMPLING: dict[str, object] = {
    "temperature": 0.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "seed": None,
    "max_tokens": 8,
    "min_tokens": 0,
    "ignore_eos": True,
    "stop": [],
    "stop_token_ids": [],
    "logit_bias": [],
    "logprobs": 5,
    "n": 1,
}


def request_value(name: str = "a", **sampling: object) -> dict[str, object]:
    """One valid request as JSON values."""
    return {
        "id": name,
        "prompt_token_ids": [1, 2, 3],
        "text": f"text of {name}",
        "messages": None,
        "sampling": {**copy.deepcopy(SAMPLING), **sampling},
        "grammar": None,
        "images": [],
    }


def manifest_value(values: Sequence[dict[str, object]], raw: bytes, **changes: object) -> dict[str, object]:
    """The manifest that belongs to valid request values and the bytes of their file."""
    tokenizer = TokenizerName(name="hand", digest="ab" * 32, vocab_size=VOCAB_SIZE)
    requests = [request_from_json(value) for value in values]
    lengths = [len(request.prompt_token_ids) for request in requests]
    manifest: dict[str, object] = {
        "schema": 1,
        "name": "hand-made",
        "description": "",
        "tokenizer": TOKENIZER,
        "arbitrary_ids": [],
        "requests": len(requests),
        "prompt_tokens": sum(lengths),
        "longest_prompt": max(lengths, default=1),
        "files": {"requests.jsonl": hashlib.sha256(raw).hexdigest()},
        "digest": content_digest(tokenizer, (), requests),
    }
    return {**manifest, **changes}


def write_corpus(folder: Path, values: Sequence[dict[str, object]], **changes: object) -> Path:
    """A corpus folder of valid requests; `changes` go into its manifest."""
    raw = "".join(json.dumps(value) + "\n" for value in values).encode()
    return write_raw(folder, raw, manifest_value(values, raw, **changes))


def write_lines(folder: Path, lines: Sequence[object]) -> Path:
    """A corpus folder whose lines may be anything (strings as they are), with a manifest that knows their bytes."""
    raw = "".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines).encode()
    return write_raw(folder, raw, manifest_value([request_value()], raw))


def write_raw(folder: Path, raw: bytes, manifest: object) -> Path:
    """A folder with exactly these two files."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "requests.jsonl").write_bytes(raw)
    (folder / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
    return folder
