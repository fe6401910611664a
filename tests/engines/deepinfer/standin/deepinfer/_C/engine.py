"""Outputs in a pool: a step gives handles, `clone` makes an object of one."""

import itertools
from types import SimpleNamespace

_POOL = {}
_HANDLES = itertools.count()


def put(**fields):
    """A handle of a new output."""
    handle = next(_HANDLES)
    _POOL[handle] = SimpleNamespace(**fields)
    return handle


class RequestOutput:
    @staticmethod
    def clone(ptr):
        return _POOL[ptr]

    @staticmethod
    def get_request_id(ptr):
        return _POOL[ptr].request_id
