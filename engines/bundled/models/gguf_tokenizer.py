"""Writes tokenizer.json and tokenizer_config.json from a GGUF file's metadata.

It knows byte-level BPE alone. Rules: a pre-tokenizer is used only if its splitting is written here; any other
is refused by name, for a guess would change token ids without a word.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from engines.bundled.errors import ModelError
from engines.bundled.models.gguf_file import GgufFile

if TYPE_CHECKING:
    from tokenizers.pre_tokenizers import PreTokenizer

_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4  # llama.cpp's token types
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_KNOWN = ("gpt-2", "llama-bpe", "smollm")


def write_tokenizer(file: GgufFile, folder: Path) -> None:
    """Writes both files into `folder`. Raises ModelError for a tokenizer this engine cannot build."""
    from tokenizers import AddedToken, Tokenizer, decoders, models

    _refuse_unsupported(file)
    tokens = list(file.need("tokenizer.ggml.tokens"))
    kinds = list(file.need("tokenizer.ggml.token_type"))
    merges = [tuple(merge.split(" ")) for merge in file.need("tokenizer.ggml.merges")]
    ignore_merges = file.get("tokenizer.ggml.pre") == "llama-bpe"  # a whole word of the vocabulary needs no merges
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=ignore_merges))
    tokenizer.pre_tokenizer = _pre_tokenizer(file)
    tokenizer.decoder = decoders.ByteLevel()
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL]
    added = [token for token, kind in zip(tokens, kinds, strict=True) if kind == _USER_DEFINED]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in added])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(_specials(file, tokens), indent=1, sort_keys=True))


def _refuse_unsupported(file: GgufFile) -> None:
    model, pre = file.need("tokenizer.ggml.model"), file.get("tokenizer.ggml.pre", "default")
    if model != "gpt2":
        msg = f"{file.path}: tokenizer.ggml.model is {model!r}; supported: 'gpt2' (byte-level BPE)"
        raise ModelError(msg)
    if pre not in _KNOWN:
        msg = f"{file.path}: tokenizer.ggml.pre is {pre!r}; supported: {', '.join(_KNOWN)}"
        raise ModelError(msg)


def _pre_tokenizer(file: GgufFile) -> PreTokenizer:
    """How text is split before merging: as the model's own tokenizer.json does it."""
    from tokenizers import Regex, pre_tokenizers

    kind = file.get("tokenizer.ggml.pre")
    if kind == "smollm":
        return pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
            ]
        )
    if kind == "llama-bpe":
        return pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(_LLAMA3), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _specials(file: GgufFile, tokens: list[str]) -> dict[str, str]:
    keys = {"bos_token": "bos", "eos_token": "eos", "pad_token": "padding", "unk_token": "unknown"}
    ids = {name: file.get(f"tokenizer.ggml.{key}_token_id") for name, key in keys.items()}
    config = {name: tokens[token] for name, token in ids.items() if token is not None}
    template = file.get("tokenizer.chat_template")
    return config if template is None else {**config, "chat_template": template}
