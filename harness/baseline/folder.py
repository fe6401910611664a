"""A folder in the user's git or on any fsspec URL, with content-addressed objects in it.

It does not know what is kept. Rules: an object's name is the SHA-256 of its bytes, checked on reading; writing the
same bytes twice writes once; a file appears whole or not at all; a folder that cannot be reached is one clear error.
"""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Callable
from typing import TypeVar

from harness.errors import OutputError, StoreError, UsageError

T = TypeVar("T")


class Folder:
    """A folder at a path or fsspec URL (`s3://…`, `memory://…`). Nothing is touched before the first call."""

    def __init__(self, url: str) -> None:
        """Raises UsageError for a URL whose scheme no installed package serves."""
        from fsspec.core import url_to_fs

        try:
            self._files, self._root = url_to_fs(os.path.expanduser(url))  # noqa: PTH111 - a URL, not a path
        except (ValueError, ImportError) as error:
            raise UsageError(
                f"{url}: cannot be opened: {error}; install the package that serves it or name a folder"
            ) from error
        self.url = url

    def put(self, content: bytes, suffix: str) -> str:
        """Stores bytes under their SHA-256, unless they are there; returns it. Raises OutputError."""
        digest = hashlib.sha256(content).hexdigest()
        name = _object(digest, suffix)
        if not self.has(name):
            self.write(name, content)
        return digest

    def get(self, digest: str, suffix: str) -> bytes:
        """The bytes of a digest. Raises StoreError when they are missing or have another digest."""
        content = self.read(_object(digest, suffix))
        if content is None:
            raise StoreError(f"{self.url}: object {digest}{suffix} is missing; restore it from version control, "
                             "or accept a new baseline")  # fmt: skip
        found = hashlib.sha256(content).hexdigest()
        if found != digest:
            raise StoreError(f"{self.url}: object {digest}{suffix}: its bytes have SHA-256 {found}: the file was "
                             "changed; restore it")  # fmt: skip
        return content

    def holds(self, digest: str, suffix: str) -> bool:
        """Whether the object is there; its bytes are not read."""
        return self.has(_object(digest, suffix))

    def has(self, name: str) -> bool:
        """Whether a file is there."""
        return self._try(lambda: bool(self._files.exists(self._path(name))))

    def read(self, name: str) -> bytes | None:
        """A file's bytes, None when there is none. Raises StoreError when it cannot be read."""

        def attempt() -> bytes | None:
            try:
                return bytes(self._files.cat_file(self._path(name)))
            except FileNotFoundError:
                return None

        return self._try(attempt)

    def write(self, name: str, content: bytes) -> None:
        """Writes a file whole or not at all, replacing what was there. Raises OutputError."""
        path = self._path(name)
        try:
            self._files.makedirs(path.rpartition("/")[0], exist_ok=True)
            if not self._is_local:
                self._files.pipe_file(path, content)  # object stores show a file once it is complete
                return
            aside = f"{path}.{secrets.token_hex(4)}.part"
            try:
                with open(aside, "wb") as file:  # noqa: PTH123 - fsspec's path is a plain string
                    file.write(content)
                    file.flush()
                    os.fsync(file.fileno())
                os.replace(aside, path)  # noqa: PTH105
            finally:
                if os.path.exists(aside):  # noqa: PTH110
                    os.unlink(aside)  # noqa: PTH108
        except OSError as error:
            raise OutputError(f"{self.url}: {name} cannot be written: {error.strerror or error}; free space, "
                              "check permissions or choose another folder") from error  # fmt: skip

    def names(self, under: str, suffix: str) -> tuple[str, ...]:
        """Files below a sub-folder whose names end in `suffix`, relative to the root, sorted."""

        def attempt() -> tuple[str, ...]:
            try:
                found = self._files.find(self._path(under))
            except FileNotFoundError:
                return ()
            prefix = self._root.rstrip("/") + "/"
            return tuple(sorted(path.removeprefix(prefix) for path in found if path.endswith(suffix)))

        return self._try(attempt)

    @property
    def _is_local(self) -> bool:
        protocol = self._files.protocol
        return "file" in ((protocol,) if isinstance(protocol, str) else protocol)

    def _path(self, name: str) -> str:
        return f"{self._root.rstrip('/')}/{name}"

    def _try(self, attempt: Callable[[], T]) -> T:
        try:
            return attempt()
        except OSError as error:
            raise StoreError(f"{self.url}: cannot be read: {error.strerror or error}; check the path and "
                             "its permissions") from error  # fmt: skip


def _object(digest: str, suffix: str) -> str:
    return f"objects/{digest[:2]}/{digest}{suffix}"
