"""`native` is plain torch: close to the definition, never asked for its bits."""

import numpy as np
from arithmetic_cases import options, pages_for, step, tiny_model, tokens

from engines.bundled.arithmetic import open_arithmetic
from engines.bundled.arithmetic.native import NativeArithmetic
from engines.bundled.kernels.interface import KernelError


def native(model, **changes) -> NativeArithmetic:
    arithmetic = open_arithmetic(model, options(arithmetic="native", **changes))
    assert isinstance(arithmetic, NativeArithmetic)
    for layer in arithmetic._layers:
        layer.keys.fill_(float("nan"))
        layer.values.fill_(float("nan"))
    return arithmetic


def test_close_to_portable_in_any_mix_of_prefill_and_decode():
    model, table = tiny_model(heads=3, kv_heads=1, head_dim=32), pages_for(rows=4, seed=1)
    ids = [tokens(i, n) for i, n in enumerate((40, 25, 33, 7))]
    theirs, ours = native(model, page_size=8), open_arithmetic(model, options(page_size=8))
    steps = [
        [(0, 0, ids[0][:20]), (1, 0, ids[1][:1])],
        [(1, 1, ids[1][1:2]), (0, 20, ids[0][20:39]), (2, 0, ids[2][:32])],
        [(0, 39, ids[0][39:]), (1, 2, ids[1][2:3]), (2, 32, ids[2][32:]), (3, 0, ids[3])],
    ]
    for pieces in steps:
        batch = step(pieces, table)
        a, b = theirs.forward(batch), ours.forward(batch)
        assert a.dtype == np.float32
        assert a.shape == b.shape
        assert np.abs(a - b).max() < 1e-4
        assert np.abs(theirs.log_softmax(a) - ours.log_softmax(b)).max() < 1e-4


def test_native_says_that_torch_computes():
    arithmetic = native(tiny_model())
    facts = arithmetic.describe()
    assert (arithmetic.name, arithmetic.definition, facts["backend"]) == ("native", 0, "torch")
    assert facts["threads"] == facts["threads_seen"] == 1


def test_the_error_of_kernels_is_no_error_of_values():
    assert not issubclass(KernelError, ValueError)
