"""What is reported of logits on the device, in Triton's interpreter, to the bit of the CPU's kernels; no GPU."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from matrix_unit import VARIABLE, import_interpreted
from presence import missing

try:
    import_interpreted()
except ImportError:
    missing("triton", "Triton is not installed; the extra `test` brings it on Linux", module=True)

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a folder up, where the engine's tests lie

from engine_cases import SMALL, ScriptedArithmetic, evidence, greedy, kernels, options, request, run_all

from engines.bundled.draft import open_drafter
from engines.bundled.engine import Engine
from engines.bundled.errors import ComputeError
from engines.bundled.kernels.library import load
from engines.bundled.logits import Asked, HostLogits


@pytest.fixture(autouse=True)
def interpreter(monkeypatch):
    monkeypatch.setenv(VARIABLE, "1")


def rows(count: int, vocab: int) -> np.ndarray:
    """Ordinary rows, one that is steep, one that is flat, one with values far below the largest, ties everywhere."""
    random = np.random.default_rng(count + vocab)
    x = random.normal(0, 3, (count, vocab)).astype(np.float32)
    x[1] *= 40
    x[2] = 0.25
    x[3] = np.where(random.random(vocab) < 0.5, -90.0, x[3])
    x[4, ::7] = x[4].max()
    x[5] = np.where(random.random(vocab) < 0.5, -0.0, 0.0)
    return torch.from_numpy(x).to(torch.bfloat16).float().numpy()


@pytest.mark.parametrize("vocab", [16, 767, 768, 5000, 768 * 9 + 5])
def test_candidates_and_logprobs_have_the_bits_of_the_cpu(monkeypatch, vocab):
    from engines.bundled.gpu.tensorcore.softmax import summarise

    x, kernels = rows(6, vocab), load("auto", "auto")
    asked = np.arange(6, dtype=np.int32) * 2
    monkeypatch.setattr("engines.bundled.gpu.tensorcore.softmax.ROWS_AT_ONCE", 4)
    found = summarise(torch.from_numpy(x).to(torch.bfloat16), 9, asked, softmax=True)
    ids, logprobs = kernels.top_k(x, 9), kernels.log_softmax(x)
    assert np.array_equal(found.ids, ids)
    assert not found.bad.any()
    for row in range(6):
        assert np.array_equal(found.values[row], x[row, ids[row]])
        mine = found.logprobs(row, found.values[row])
        assert np.array_equal(mine.view(np.int32), logprobs[row, ids[row]].view(np.int32))
        everything = found.logprobs(row, x[row])
        assert np.array_equal(everything.view(np.int32), logprobs[row].view(np.int32))
        assert found.asked[row] == x[row, asked[row]]


def test_what_is_no_number_is_counted():
    from engines.bundled.gpu.tensorcore.softmax import summarise

    x = torch.from_numpy(rows(6, 5000))
    x[1, 4999], x[3, 0], x[3, 7] = float("nan"), float("inf"), float("-inf")
    found = summarise(x.to(torch.bfloat16), 1, np.zeros(6, np.int32), softmax=False)
    assert found.bad.tolist() == [0, 1, 0, 2, 0, 0]
    assert np.isnan(found.logarithm).all()


def test_a_largest_logit_of_minus_zero_that_was_asked_for_has_the_logprob_of_the_cpu():
    from engines.bundled.gpu.tensorcore.softmax import CardLogits

    x = np.full((1, 40), -100.0, np.float32)
    x[0, 7] = -0.0
    asked = Asked(most=1, ids=np.array([7], np.int32), softmax=True)
    host = HostLogits(x, kernels(), kernels().log_softmax).row(0)
    card = CardLogits(torch.from_numpy(x).to(torch.bfloat16), asked, kernels()).row(0)
    expected, found = (row.logprobs(asked.ids) for row in (host, card))
    assert expected.view(np.int32).tolist() == found.view(np.int32).tolist() == [0]


def test_reports_stay_on_the_host_if_the_device_gives_other_bits(monkeypatch):
    from engines.bundled.gpu.tensorcore import selfcheck

    made = SimpleNamespace(
        model=SMALL, kernels=kernels(), engine=options(), facts={}, can_report=False,
        weights=SimpleNamespace(head=torch.zeros(1, dtype=torch.bfloat16)),
    )  # fmt: skip
    selfcheck.check_reports(made)
    assert made.can_report
    assert made.facts == {"gpu_reports": "on the device, equal in 183 logprobs"}
    real = selfcheck.summarise
    for part in ("bad", "ids", "values", "asked", "logarithm"):

        def wrong(*given, part=part, **named):
            found = real(*given, **named)
            return found._replace(**{part: np.zeros_like(getattr(found, part))})

        monkeypatch.setattr(selfcheck, "summarise", wrong)
        selfcheck.check_reports(made)
        assert not made.can_report, part
        assert made.facts["gpu_reports"].startswith("on the host: ")


class Card(ScriptedArithmetic):
    """Scripted logits with many ties, in bfloat16, as a device would leave them."""

    can_report = True

    def forward(self, batch):
        return (np.round(2 * super().forward(batch)) / 2).astype(np.float32)

    def report(self, batch, asked):
        from engines.bundled.gpu.tensorcore.softmax import CardLogits

        return CardLogits(torch.from_numpy(self.forward(batch)).to(torch.bfloat16), asked, kernels())


SEEDED = greedy(temperature=0.7, seed=11, top_k=9, top_p=0.9, max_tokens=4)
FEW = [  # what the largest logits decide
    request("greedy", [5, 9, 5, 9], greedy(max_tokens=5, logprobs=20)),
    request("seeded", [5, 9, 5, 9], SEEDED),
    request("more than there are", [3], dataclasses.replace(SEEDED, top_k=64, logprobs=0)),
    request("forced", [4, 4], greedy(logprobs=2), forced=(1, 60, 0, 7)),
    request("forced and drawn", [4, 4], SEEDED, forced=(1, 60, 0, 7)),
]
ALL = [  # what needs a whole row
    request("nucleus", [5, 9], dataclasses.replace(SEEDED, top_k=0)),
    request("penalised", [5, 9, 9], greedy(frequency_penalty=0.3, repetition_penalty=1.2, max_tokens=4)),
    request("biased", [2], dataclasses.replace(SEEDED, logit_bias=((3, 4.0),))),
    request("digest", [2, 3], greedy(max_tokens=3), logits_digest=True),
]


@pytest.mark.parametrize("changes", [{}, {"async_scheduling": True}, {"draft": "lookup"}, {"observer": "none"}])
def test_an_engine_reports_the_same_of_logits_on_the_device_and_on_the_host(monkeypatch, changes):
    from engines.bundled.gpu.tensorcore.softmax import CardRow

    fetched: list[int] = []
    whole = CardRow.logits
    monkeypatch.setattr(CardRow, "logits", lambda self: fetched.append(1) or whole(self))

    def run(requests, *, on_device: bool):
        config = options(max_num_seqs=8, num_pages=64, **changes)
        arithmetic = Card(SMALL, config)
        monkeypatch.setattr(Card, "can_report", on_device)
        engine = Engine(SMALL, config, arithmetic, kernels(), str, drafter=open_drafter(None, config, kernels()))
        return [evidence(sequence) for sequence in run_all(engine, requests)]

    assert run(FEW, on_device=True) == run(FEW, on_device=False)
    assert not fetched
    assert run(ALL, on_device=True) == run(ALL, on_device=False)
    assert fetched


def test_a_logit_that_is_no_number_is_named_from_the_device_too():
    engine = Engine(SMALL, options(), arithmetic := Card(SMALL, options()), kernels(), str)
    arithmetic.spoil[5, 9] = np.full(SMALL.vocab_size, 1.0, np.float32)
    arithmetic.spoil[5, 9][13] = np.nan
    engine.submit(request("r", [5, 9]))
    with pytest.raises(ComputeError, match=r"request 'r', generated position 0: logit of token 13 is nan"):
        engine.step()
