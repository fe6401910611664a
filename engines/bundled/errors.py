"""Every error the bundled engine raises on purpose, one tree. It knows nothing of verdicts or exit codes.

BundledError
├── ModelError        a model that is missing, unreadable or not of a supported kind
├── RequestError      a request that cannot be run as written; the message names it
├── CacheStoreError   a saved prefix cache that is damaged, or of another origin
├── RankError         a process of a parallel engine that is lost, cannot start or does not match the others
├── NotSupported      something this engine does not do, with the reason
└── ComputeError      a step that went wrong: logits that are no numbers, pages that were lost

A message says where, what was expected and found, and what to do.
"""


class BundledError(Exception):
    """Base of every error the bundled engine raises on purpose."""


class ModelError(BundledError):
    """A model that is missing, unreadable or not of a supported kind."""


class RequestError(BundledError):
    """A request that cannot be run as written."""


class CacheStoreError(BundledError):
    """A saved prefix cache that cannot be written, is damaged, or comes from another origin."""


class RankError(BundledError):
    """A process of a parallel engine that is lost, cannot start or does not match the others; the message names it."""


class NotSupported(BundledError):  # noqa: N818 - an answer, not a fault
    """Something this engine does not do, with the reason."""


class ComputeError(BundledError):
    """A step that went wrong. `request_id` is the one request to blame, None if it is none in particular."""

    def __init__(self, message: str, request_id: str | None = None) -> None:
        """The message names the request too."""
        super().__init__(message)
        self.request_id = request_id
