"""Thinking Machines' batch_invariant_ops in place of torch's operators, where that package is installed.

Rules: what it put in torch's place is read from the library object it registered with, never from its documentation;
what it leaves as it was is said beside it. It is for GPUs: its kernels are Triton's.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping
from types import ModuleType

from harness.engine import Scalar
from harness.errors import EngineError, Unsupported

PACKAGE = "batch_invariant_ops"
MODULES = ("batch_invariant_ops.batch_invariant_ops", "batch_invariant_ops")  # where its library object may live
LIBRARY = "_batch_invariant_LIB"
WANTED = (
    "_log_softmax",
    "addmm",
    "bmm",
    "mean.dim",
    "mm",
    "scaled_dot_product_attention",
)  # what a model computes with
NOT_INSTALLED = (
    "batch_invariant_ops is not installed here: it is Thinking Machines' package of that name "
    "(github.com/thinking-machines-lab/batch_invariant_ops)"
)


def enable_operators(device: str) -> None:
    """Replaces torch's operators in this process. Raises Unsupported if it cannot, EngineError if it did not."""
    if importlib.util.find_spec(PACKAGE) is None:
        raise Unsupported(NOT_INSTALLED)
    if device != "cuda":
        raise Unsupported("batch_invariant_ops has Triton kernels for GPUs; the model is on the CPU")
    importlib.import_module(PACKAGE).enable_batch_invariant_mode()
    if not replaced():
        raise EngineError("batch_invariant_ops says that it is enabled, and its library registered no operator")


def replaced() -> tuple[str, ...]:
    """Operators that stand in torch's place now, sorted; empty where the package was never enabled."""
    library = next((found for module in _loaded() if (found := getattr(module, LIBRARY, None)) is not None), None)
    names = {str(name).split("/")[1] for name in getattr(library, "_op_impls", ()) if str(name).count("/") >= 1}
    return tuple(sorted(name.split("::")[-1] for name in names))


def observe_operators() -> Mapping[str, Scalar]:
    """What was replaced, and what a model also computes with and was not."""
    found = replaced()
    if not found:
        return {"invariant_operators": "none"}
    return {"invariant_operators": ",".join(found), "other_operators": ",".join(sorted(set(WANTED) - set(found)))}


def _loaded() -> list[ModuleType]:
    import sys

    return [sys.modules[name] for name in MODULES if name in sys.modules]
