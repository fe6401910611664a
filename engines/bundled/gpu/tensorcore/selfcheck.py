"""Whether one prompt gives the same logits whole and in pieces, and whether the device's log-softmax is the CPU's.

Asked at each start on the model itself. Rules: on the first pages of the pool, before any request; one differing bit
between pieces is a refusal, because prefill and decode attend with different tiles, which is allowed only as long as
their bits agree; one in a report leaves reports to the CPU's kernels.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import torch

from engines.bundled.batch import StepBatch
from engines.bundled.config import Int32
from engines.bundled.errors import NotSupported
from engines.bundled.gpu.tensorcore.forward import TensorCoreArithmetic
from engines.bundled.gpu.tensorcore.operators import KEYS
from engines.bundled.gpu.tensorcore.selftest import sample
from engines.bundled.gpu.tensorcore.softmax import summarise

REPORTED = 20  # candidates
SPREADS = (0.01, 1.0, 50.0)  # of logits, a row each
LENGTH = 2 * KEYS + 44  # past two splits of keys


def check_forms(arithmetic: TensorCoreArithmetic) -> int:
    """Logits compared. Raises NotSupported naming the first way to cut the prompt whose logits differ."""
    size, pool = arithmetic.engine.page_size, arithmetic.engine.num_pages
    length = min(LENGTH, arithmetic.model.max_position_embeddings, (pool - 1) * size)
    vocab = arithmetic.model.vocab_size
    prompt = (np.arange(length, dtype=np.int64) * 7919 % vocab).astype(np.int32)
    pages = np.arange(pool, dtype=np.int32)[: -(-length // size)]
    whole = arithmetic.logits(_step(prompt, pages, 0, length)).clone()
    compared = 0
    for cut in ((length - 1,), (1, length // 3, length // 2 + 1), tuple(range(length - 4, length))):
        bounds = [0, *cut, length]
        for start, end in pairwise(bounds):
            found = arithmetic.logits(_step(prompt, pages, start, end))
        differing = int((found.view(torch.int16) != whole.view(torch.int16)).sum())
        compared += found.numel()
        if differing:
            raise NotSupported(
                f"arithmetic=tensorcore: self-check: a prompt of {length} tokens cut at {list(cut)} differs from the "
                f"whole one in {differing} of {found.numel()} logits; this card, Triton or driver does not give "
                "prefill and decode the same bits; use arithmetic=portable"
            )
    return compared


def check_reports(arithmetic: TensorCoreArithmetic) -> None:
    """Lets reports be formed on the device if they have the bits of the CPU's kernels; either way a fact says so."""
    vocab, kernels = arithmetic.model.vocab_size, arithmetic.kernels
    k, rows = min(REPORTED, vocab), len(SPREADS)
    logits = sample(rows, vocab, arithmetic.weights.head.device, torch.float32).clamp(-200, 200)
    logits = (logits * torch.tensor(SPREADS, device=logits.device)[:, None]).to(arithmetic.weights.head.dtype)
    logits[0] = -logits[0].abs()  # also the largest are below 0
    x, asked = logits.float().cpu().numpy(), np.arange(rows, dtype=np.int32) * (vocab // rows)
    found = summarise(logits, k, asked, softmax=True)
    expected, ids = kernels.log_softmax(x, arithmetic.engine.threads), kernels.top_k(x, k)
    mine = np.stack([found.logprobs(row, x[row]) for row in range(rows)])
    wrong = int((mine.view(np.int32) != expected.view(np.int32)).sum()) + int((found.ids != ids).sum())
    wrong += int((found.values != np.take_along_axis(x, ids, 1)).sum())
    wrong += int((found.asked != np.take_along_axis(x, asked[:, None], 1)[:, 0]).sum())
    wrong += _unseen(logits, found.bad)
    arithmetic.can_report = wrong == 0
    arithmetic.facts["gpu_reports"] = (
        f"on the device, equal in {mine.size} logprobs" if not wrong else f"on the host: {wrong} of {mine.size} differ"
    )


def _unseen(logits: torch.Tensor, bad: Int32) -> int:
    """Of three finite rows: how many were not said to be that (`bad`), or to be so with a NaN or an infinity in it."""
    spoiled = logits.clone()
    spoiled[:, -1] = torch.tensor((torch.nan, torch.inf, -torch.inf), dtype=logits.dtype, device=logits.device)
    return int((bad != 0).sum()) + int((summarise(spoiled, 1, np.zeros_like(bad), softmax=False).bad != 1).sum())


def _step(prompt: Int32, pages: Int32, start: int, end: int) -> StepBatch:
    count = end - start
    return StepBatch(
        token=prompt[start:end],
        sequence=np.zeros(count, np.int32),
        position=np.arange(start, end, dtype=np.int32),
        page_table=pages[None],
        wanted=np.array([count - 1], np.int32),
    )
