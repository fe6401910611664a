"""Without a compiler the same bits come from torch.bmm where it is exact, and from the twin where it is not."""

import numpy as np
import pytest
from arithmetic_cases import ALL_KERNELS, normal, options, pages_for, same, step, tiny_model, tokens

from engines.bundled import twin
from engines.bundled.arithmetic import open_arithmetic
from engines.bundled.kernels.fallback import FallbackKernels, open_fallback
from engines.bundled.kernels.interface import KernelError
from engines.bundled.kernels.library import load
from engines.bundled.kernels.selfcheck import SPREADS, agrees, values


def test_a_whole_step_has_the_bits_of_the_kernels():
    model, table = tiny_model(inner=90), pages_for(rows=2, seed=4)
    arms = [open_arithmetic(model, options(compiler=name, page_size=8)) for name in ("auto", "none")]
    ids = tokens(1, 22)
    for pieces in ([(0, 0, ids[:12]), (1, 0, ids[:9])], [(1, 9, ids[9:10]), (0, 12, ids[12:])]):
        ours, slow = (arm.forward(step(pieces, table)) for arm in arms)
        assert same(ours, slow)
        assert same(arms[0].log_softmax(ours), arms[1].log_softmax(ours))
    facts = arms[1].describe()
    assert (facts["backend"], facts["compiler"], facts["isa"]) == ("fallback", "none", "none")
    assert facts["backend_reason"] == "compiler=none; torch.bmm where it equals the twin, the twin elsewhere"


@pytest.mark.parametrize("spread", SPREADS)
def test_products_equal_the_twin_whatever_torch_does(spread):
    kernels = load("auto", "none")
    for count, outputs, inputs, width in ((1, 33, 200, 192), (9, 17, 130, 64), (20, 8, 96, 96)):
        x, weight = values((count, inputs), 1, spread), values((outputs, inputs), 2, spread)
        out = np.empty((count, outputs), np.float32)
        kernels.linear(x, kernels.pack(weight, 1), width, 1, out)
        assert same(out, twin.linear(x, weight, width))


def test_a_torch_that_adds_otherwise_is_found_and_replaced(monkeypatch):
    def other_order(self, x, weight, width):
        return x @ weight.T + np.float32(0.0) if width < 64 else twin.linear(x, weight, width)

    monkeypatch.setattr(FallbackKernels, "bmm_product", other_order)
    kernels = open_fallback("test")
    x, weight = normal(1, 3, 96), normal(2, 50, 96)
    for width in (32, 64):
        out = np.empty((3, 50), np.float32)
        kernels.linear(x, kernels.pack(weight, 1), width, 1, out)
        assert same(out, twin.linear(x, weight, width))
    assert kernels.exact_shapes() == (1, 2)


def test_the_check_compares_every_element():
    def one_wrong(x, weight, width):
        y = twin.linear(x, weight, width)
        y[-1, -1] = np.nextafter(y[-1, -1], np.float32(np.inf))
        return y

    def flushes(x, weight, width):
        y = twin.linear(x, weight, width)
        return np.where(np.abs(y) < 2.0**-126, np.float32(0.0), y)

    weight = normal(1, 70, 64)
    assert agrees(twin.linear, weight, 32, 8)
    assert not agrees(one_wrong, weight, 32, 8)
    assert not agrees(flushes, weight, 32, 8)


def test_flushed_subnormals_are_refused():
    import torch

    try:
        torch.set_flush_denormal(True)
        with pytest.raises(KernelError, match="numpy flushes subnormals"):
            open_fallback("test")
    finally:
        torch.set_flush_denormal(False)


def test_sampling_functions_agree_with_the_kernels():
    slow, ours = load("auto", "none"), ALL_KERNELS[0]
    logits = normal(3, 4, 300, scale=4)
    logits[1, ::7] = -np.inf
    logits[2, :] = np.where(np.arange(300) % 2, 0.0, -0.0)
    assert same(slow.exp(logits), ours.exp(logits))
    assert same(slow.log(np.abs(logits)), ours.log(np.abs(logits)))
    assert slow.argmax(logits).tolist() == ours.argmax(logits).tolist()
    assert slow.top_k(logits, 20).tolist() == ours.top_k(logits, 20).tolist()
    assert slow.check_finite(logits) == ours.check_finite(logits) == 1
    assert slow.check_finite(logits[2:]) == -1
    assert same(slow.log_softmax(logits[2:]), ours.log_softmax(logits[2:]))
    for u in (0.0, 0.3, 0.999):
        assert slow.draw(logits[1], 0.8, 20, 0.9, 0.01, u) == ours.draw(logits[1], 0.8, 20, 0.9, 0.01, u)
