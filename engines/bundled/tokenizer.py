"""Tokenizers: text to ids and back, and a model's chat template. They know no model and no request.

Rules: no special tokens are added to plain text; bytes that are no UTF-8 decode to U+FFFD; a template is
rendered in a sandbox and may not look at the clock, for ids must not depend on the day.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, NoReturn, Protocol

from engines.bundled.errors import ModelError

if TYPE_CHECKING:
    import tokenizers

Messages = Sequence[tuple[str, str]]  # (role, content)
BytePieces = tuple[bytes, ...]  # the bytes of ids from 0 on; ids beyond them are no text
SPECIAL_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")  # what a template may name


class Tokenizer(Protocol):
    """Text to token ids for one model."""

    @property
    def digest(self) -> str:
        """SHA-256 over everything that decides the ids, chat template included."""

    @property
    def template_digest(self) -> str:
        """SHA-256 over the chat template and the special tokens it may name."""

    @property
    def vocab_size(self) -> int:
        """Ids are below this."""

    def encode(self, text: str) -> tuple[int, ...]:
        """Token ids of plain text."""

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids, special tokens included."""

    def encode_chat(self, messages: Messages) -> tuple[int, ...]:
        """Token ids of messages in the chat template, with the assistant's turn opened. Raises ModelError."""

    def definition(self) -> str | BytePieces:
        """What the ids stand for, to a reader of vocabularies: a tokenizer.json, or bytes."""


class ByteTokenizer:
    """One id per UTF-8 byte (0 to 255), three specials, and names for the remaining ids, which no text yields."""

    START, END, BEGIN = 256, 257, 258  # of a message, of a message (and of the output), of a chat
    _SPECIALS: ClassVar = {START: "<|start|>", END: "<|end|>", BEGIN: "<|begin|>"}

    def __init__(self, vocab_size: int) -> None:
        """Ids from 259 to `vocab_size` - 1 decode to their number."""
        self.vocab_size = vocab_size
        self.template_digest = _sha256("begin; start role newline content end newline; start assistant newline")
        self.digest = _sha256(f"bytes {vocab_size} {sorted(self._SPECIALS.items())} {self.template_digest}")

    def encode(self, text: str) -> tuple[int, ...]:
        """The text's UTF-8 bytes."""
        return tuple(text.encode())

    def decode(self, ids: Sequence[int]) -> str:
        """Bytes as UTF-8; other ids as their name."""
        pieces = [bytes([token]) if token < self.START else self._name(token).encode() for token in ids]
        return b"".join(pieces).decode(errors="replace")

    def encode_chat(self, messages: Messages) -> tuple[int, ...]:
        """Every message between its marks, then the start of the assistant's."""
        ids = [self.BEGIN]
        for role, content in messages:
            ids += [self.START, *f"{role}\n{content}".encode(), self.END, *b"\n"]
        return (*ids, self.START, *b"assistant\n")

    def definition(self) -> BytePieces:
        """Single bytes."""
        return tuple(bytes([token]) for token in range(self.START))

    def _name(self, token: int) -> str:
        return self._SPECIALS.get(token, f"<|{token}|>")


class FileTokenizer:
    """A Hugging Face `tokenizer.json` with the chat template that lies beside it."""

    def __init__(self, folder: Path) -> None:
        """Reads the folder. Raises ModelError if tokenizer.json is missing or unreadable."""
        path = folder / "tokenizer.json"
        if not path.is_file():
            msg = f"{folder}: expected a tokenizer.json there, found none"
            raise ModelError(msg)
        data = path.read_bytes()
        self._folder = folder
        self._tokenizer = _load(path, data)
        self._template, self._specials = read_chat_template(folder)
        self.template_digest = _sha256(json.dumps([self._template, self._specials], sort_keys=True))
        self.digest = _sha256(hashlib.sha256(data).hexdigest() + self.template_digest)

    @property
    def vocab_size(self) -> int:
        """Ids are below this; added tokens count."""
        return self._tokenizer.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str) -> tuple[int, ...]:
        """Ids without special tokens added; the text's own mentions of special tokens are recognised."""
        return tuple(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, special tokens included."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)

    def encode_chat(self, messages: Messages) -> tuple[int, ...]:
        """Ids of the rendered chat template. Raises ModelError if there is none or it rejects the messages."""
        if self._template is None:
            msg = f"{self._folder}: the model has no chat template; give text or token ids instead of messages"
            raise ModelError(msg)
        return self.encode(render_chat(self._template, self._specials, messages))

    def definition(self) -> str:
        """The text of tokenizer.json."""
        return self._tokenizer.to_str()


def read_chat_template(folder: Path) -> tuple[str | None, dict[str, str]]:
    """The template (chat_template.jinja wins over tokenizer_config.json) and the special tokens by name."""
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    specials = {name: _token_text(config.get(name)) for name in ("bos_token", "eos_token", "pad_token", "unk_token")}
    known = {name: text for name, text in specials.items() if text is not None}
    beside = folder / "chat_template.jinja"
    if beside.is_file():
        return beside.read_text(encoding="utf-8"), known
    template = config.get("chat_template")
    if isinstance(template, list):  # several by name
        template = {item["name"]: item["template"] for item in template}.get("default")
    return template, known


def render_chat(template: str, specials: dict[str, str], messages: Messages) -> str:
    """The template's text with the assistant's turn opened. Raises ModelError with the template's own complaint."""
    import jinja2
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.globals["raise_exception"] = _refuse
    turns = [{"role": role, "content": content} for role, content in messages]
    try:
        return environment.from_string(template).render(messages=turns, add_generation_prompt=True, **specials)
    except jinja2.TemplateError as error:
        msg = f"the chat template cannot render these messages: {error}"
        raise ModelError(msg) from error


def _refuse(message: str) -> NoReturn:
    msg = f"the chat template refuses these messages: {message}"
    raise ModelError(msg)


def _load(path: Path, data: bytes) -> tokenizers.Tokenizer:
    import tokenizers

    try:
        return tokenizers.Tokenizer.from_buffer(data)
    except ValueError as error:
        msg = f"{path}: not a tokenizer.json ({error})"
        raise ModelError(msg) from error


def _token_text(token: object) -> str | None:
    """Special tokens are written as a string or as an object with `content`."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
