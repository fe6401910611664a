"""Every error a user can meet, one tree, one exit code per class.

SamebitsError
├── UsageError            2   a command line, option or path that cannot be used
│   ├── CellError         2   a cell or matrix file (all mistakes of the file, each with its path)
│   ├── CorpusError       2   a corpus that is malformed, empty or not what its manifest says
│   ├── ModelError        2   a model that is missing, unreadable or unsupported
│   └── OutputError       2   a folder that cannot be written (read-only, full disk)
├── EngineError           4   an engine that could not start, crashed, hung or answered wrongly
│   ├── EngineDied        4   an engine that failed in the middle of its work and must not be used any more
│   └── Unsupported       3   an engine that says, with its reason, that it cannot do what was asked
└── StoreError            2   stored captures that are damaged, of another schema, or not what was asked for

A message says where, what was expected and found, and what to do.
"""


class SamebitsError(Exception):
    """Base of every error raised on purpose; `exit_code` is what the command line returns for it."""

    exit_code = 2


class UsageError(SamebitsError):
    """A command line, option or path that cannot be used."""


class CellError(UsageError):
    """A cell or matrix file that does not validate; the message lists every mistake with its path."""


class CorpusError(UsageError):
    """A corpus that is malformed, empty, or does not match its manifest."""


class ModelError(UsageError):
    """A model that is missing, unreadable or unsupported."""


class OutputError(UsageError):
    """An output folder that cannot be written."""


class EngineError(SamebitsError):
    """An engine that could not start, crashed, hung or answered wrongly."""

    exit_code = 4


class EngineDied(EngineError):  # noqa: N818 - what it did, and the reader's word for it
    """An engine that failed in the middle of its work; its process ends, and what is left runs in another."""


class Unsupported(EngineError):  # noqa: N818 - a verdict's name, not a fault
    """An engine's own word, with the reason, that it cannot do what was asked."""

    exit_code = 3


class StoreError(SamebitsError):
    """Stored captures that are damaged, of another schema, or not what was asked for."""
