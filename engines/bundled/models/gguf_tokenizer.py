"""Writes tokenizer.json and tokenizer_config.json from a GGUF file's metadata.

It knows byte-level BPE ("gpt2") and SentencePiece BPE ("llama"). Rules: a pre-tokenizer is used only if its splitting
is written here; any other is refused by name, for a guess would change token ids without a word.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from engines.bundled.errors import ModelError
from engines.bundled.models.gguf_file import GgufFile

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from tokenizers.pre_tokenizers import PreTokenizer

_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4  # llama.cpp's token types
_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|DIGITS| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_DIGITS = {"llama-bpe": r"\p{N}{1,3}", "qwen2": r"\p{N}"}
_KNOWN = ("gpt-2", "llama-bpe", "qwen2", "smollm")
_SPACE = "\u2581"  # SentencePiece's mark for a space


def write_tokenizer(file: GgufFile, folder: Path) -> None:
    """Writes both files into `folder`. Raises ModelError for a tokenizer this engine cannot build."""
    from tokenizers import AddedToken

    tokens = list(file.need("tokenizer.ggml.tokens"))
    kinds = list(file.need("tokenizer.ggml.token_type"))
    if len(kinds) != len(tokens):
        expected = f"{file.path}: tokenizer.ggml.token_type: expected one for each of {len(tokens)} tokens"
        raise ModelError(f"{expected}, found {len(kinds)}")
    _refuse_unsupported(file)
    model = file.need("tokenizer.ggml.model")
    tokenizer = _sentencepiece(file, tokens, kinds) if model == "llama" else _byte_level(file, tokens)
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL]
    added = [token for token, kind in zip(tokens, kinds, strict=True) if kind == _USER_DEFINED]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in added])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(_specials(file, tokens), indent=1, sort_keys=True))


def _byte_level(file: GgufFile, tokens: list[str]) -> Tokenizer:
    from tokenizers import Tokenizer, decoders, models, normalizers

    pre = file.get("tokenizer.ggml.pre")
    ignore_merges = pre == "llama-bpe"  # a whole word of the vocabulary needs no merges
    vocabulary = {token: index for index, token in enumerate(tokens)}
    merges = _checked_merges(file, vocabulary)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=ignore_merges))
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _pre_tokenizer(pre)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _checked_merges(file: GgufFile, vocabulary: Mapping[str, int]) -> list[tuple[str, str]]:
    """Raises ModelError for a merge that is no pair, or of tokens that are not there."""
    merges = []
    for index, merge in enumerate(file.need("tokenizer.ggml.merges")):
        left, _, right = merge.partition(" ")
        unknown = [token for token in (left, right, left + right) if token not in vocabulary]
        if unknown:
            where = f"{file.path}: tokenizer.ggml.merges[{index}] is {merge!r}"
            raise ModelError(f"{where}: expected two tokens that make a third, found no token {unknown[0]!r}")
        merges.append((left, right))
    return merges


def _sentencepiece(file: GgufFile, tokens: list[str], kinds: list[int]) -> Tokenizer:
    """SentencePiece's BPE as Hugging Face's LlamaTokenizer builds it: every split of a piece into two is a merge."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    scores = [float(score) for score in file.need("tokenizer.ggml.scores")]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    unknown = [token for token, kind in zip(tokens, kinds, strict=True) if kind == _UNKNOWN]
    if len(scores) != len(tokens) or len(unknown) != 1:
        found = f"{len(scores)} scores and {len(unknown)} unknown tokens"
        raise ModelError(f"{file.path}: expected a score for each of {len(tokens)} tokens and one unknown, got {found}")
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocabulary,
            merges=_merges(vocabulary, scores),
            unk_token=unknown[0],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    spaces = [normalizers.Prepend(_SPACE)] if file.get("tokenizer.ggml.add_space_prefix", True) else []
    tokenizer.normalizer = normalizers.Sequence([*spaces, normalizers.Replace(" ", _SPACE)])
    strip = [decoders.Strip(" ", 1, 0)] if spaces else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return tokenizer


def _merges(vocabulary: dict[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """Merges by score of what they make, highest first; then by the order of transformers' `generate_merges`."""
    found = []
    for piece, index in vocabulary.items():
        halves = [(piece[:cut], piece[cut:]) for cut in range(1, len(piece))]
        inside = [(left, right) for left, right in halves if left in vocabulary and right in vocabulary]
        inside.sort(key=lambda pair: (vocabulary[pair[0]], vocabulary[pair[1]]))
        found += [(scores[index], len(left), len(right), left, right) for left, right in inside]
    found.sort(key=lambda merge: merge[:3], reverse=True)
    return [(left, right) for *_, left, right in found]


def _refuse_unsupported(file: GgufFile) -> None:
    model, pre = file.need("tokenizer.ggml.model"), file.get("tokenizer.ggml.pre", "default")
    if model not in ("gpt2", "llama"):
        known = "'gpt2' (byte-level BPE), 'llama' (SentencePiece)"
        raise ModelError(f"{file.path}: tokenizer.ggml.model is {model!r}; supported: {known}")
    if model == "gpt2" and pre not in _KNOWN:
        msg = f"{file.path}: tokenizer.ggml.pre is {pre!r}; supported: {', '.join(_KNOWN)}"
        raise ModelError(msg)
    for name in ("precompiled_charsmap", "remove_extra_whitespaces"):
        if model == "llama" and file.get(f"tokenizer.ggml.{name}"):
            raise ModelError(f"{file.path}: tokenizer.ggml.{name} is given; supported: SentencePiece without it")


def _pre_tokenizer(kind: str) -> PreTokenizer:
    """How text is split before merging: as the model's own tokenizer.json does it."""
    from tokenizers import Regex, pre_tokenizers

    if kind == "smollm":
        return pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
            ]
        )
    if kind in _DIGITS:
        return pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(_SPLIT.replace("DIGITS", _DIGITS[kind])), behavior="isolated"),
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
