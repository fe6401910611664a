"""What mode cpu-invariant changes in vLLM's functions: padding, candidates, tiles; at the end on vLLM's own kernel."""

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from engines.vllm_invariance import _cut, ordered, padded, query_tokens, tiled

ROOT = Path(__file__).resolve().parents[3]
LOGPROBS = torch.tensor([[-1.0, -3.0, -2.0, -2.0, -2.0, -1.0, -9.0], [-4.0, -1.0, -2.0, -3.0, -5.0, -6.0, -7.0]])


@dataclass
class Metadata:
    """The part of vLLM's CommonAttentionMetadata that is cut."""

    query_start_loc: torch.Tensor
    query_start_loc_cpu: torch.Tensor
    seq_lens: torch.Tensor
    num_reqs: int
    max_query_len: int
    block_table_tensor: torch.Tensor
    causal: bool = True


def metadata(*requests, **changed):
    """Requests as (context with the queries, queries)."""
    starts = torch.tensor([0, *torch.tensor([count for _, count in requests]).cumsum(0).tolist()], dtype=torch.int32)
    table = torch.arange(len(requests) * 2, dtype=torch.int32).reshape(-1, 2)
    ends = torch.tensor([end for end, _ in requests], dtype=torch.int32)
    most = max(count for _, count in requests)
    return Metadata(starts, starts, ends, len(requests), most, table, **changed)


def top(logprobs, wanted, token_ids, order):
    """As vLLM's gather_logprobs, with equal values in the order that torch happens to use, here `order`."""
    ids = torch.tensor([sorted(order, key=lambda token: -float(row[token]))[:wanted] for row in logprobs]).long()
    ids = torch.cat([token_ids[:, None], ids], dim=1)
    ranks = (logprobs > logprobs.gather(1, token_ids[:, None])).sum(1)
    return SimpleNamespace(logprob_token_ids=ids.int(), logprobs=logprobs.gather(1, ids), selected_token_ranks=ranks)


@pytest.mark.parametrize("wanted", range(1, 7))
@pytest.mark.parametrize("order", [range(7), [6, 5, 4, 3, 2, 1, 0], [3, 0, 4, 6, 2, 5, 1]])
def test_candidates_do_not_depend_on_how_many_are_taken(wanted, order):
    count = [0]
    gather = ordered(lambda logprobs, k, token_ids: top(logprobs, k, token_ids, order), count)
    found = gather(LOGPROBS, wanted, token_ids=torch.tensor([6, 3]))
    assert found.logprob_token_ids[:, 1:].tolist() == [[0, 5, 2, 3, 4, 1][:wanted], [1, 2, 3, 0, 4, 5][:wanted]]
    assert found.logprob_token_ids[:, 0].tolist() == [6, 3]  # what was sampled stays in front
    assert torch.equal(found.logprobs, LOGPROBS.gather(1, found.logprob_token_ids.long()))
    assert found.logprob_token_ids.dtype == torch.int32
    if list(order) == [6, 5, 4, 3, 2, 1, 0]:
        assert count[0] == 1  # the row without equal values was left alone


def test_no_candidates_are_none():
    gather = ordered(lambda logprobs, k, token_ids: top(logprobs, k, token_ids, range(7)), [0])
    assert gather(LOGPROBS, 0, token_ids=torch.tensor([6, 3])).logprob_token_ids.tolist() == [[6], [3]]


def test_one_row_is_computed_as_two():
    seen, count = [], [0]

    def product(handler, rows, bias):
        seen.append(tuple(rows.shape))
        return rows * 2

    double = padded(product, count, x=1)
    assert double("h", torch.ones(1, 3), None).tolist() == [[2.0, 2.0, 2.0]]
    assert double("h", torch.ones(2, 3), None).shape == (2, 3)
    assert (seen, count) == ([(2, 3), (2, 3)], [1])


def test_requests_are_cut_and_every_query_keeps_its_place():
    found = _cut(metadata((20, 20), (50, 1), (40, 16)), 8)
    assert found.query_start_loc.tolist() == [0, 8, 16, 20, 21, 29, 37]
    assert found.seq_lens.tolist() == [8, 16, 20, 50, 32, 40]  # a query attends to nothing behind it
    assert found.block_table_tensor[:, 0].tolist() == [0, 0, 0, 2, 4, 4]
    assert (found.num_reqs, found.max_query_len) == (6, 8)


@pytest.mark.parametrize(("isa", "heads", "tokens"), [
    ("vec", 3, 8), ("vec", 1, 8), ("vec", 4, 2), ("vec", 8, 1), ("vec", 16, 8), ("amx", 3, 2), ("amx", 16, 1),
])  # fmt: skip
def test_queries_of_one_iteration(isa, heads, tokens):
    assert query_tokens(isa, heads) == tokens


def test_only_what_is_too_long_is_cut_and_what_cannot_be_cut_is_refused():
    builder, count = SimpleNamespace(isa="vec", num_heads=9, num_kv_heads=3), [0]
    build = tiled(lambda self, prefix, given, fast: given.num_reqs, count)
    assert build(builder, 0, metadata((30, 8), (9, 1))) == 2
    assert build(builder, 0, metadata((30, 9), (9, 1))) == 3
    assert count == [1]
    with pytest.raises(NotImplementedError, match="causal"):
        build(builder, 0, metadata((30, 9), causal=False))


@pytest.mark.usefixtures("vllm")
@pytest.mark.xdist_group("vllm")
def test_vllms_own_attention_keeps_its_bits_once_queries_are_cut_and_not_before():
    result = subprocess.run([sys.executable, str(Path(__file__).with_name("attention_rows.py"))], cwd=ROOT,
                            capture_output=True, text=True, timeout=300, check=False)  # fmt: skip
    assert result.returncode == 0, result.stderr
    before, after = (int(word) for word in result.stdout.split()[-2:])
    assert before > 0  # whole and in chunks differ as vLLM comes, with the split of keys off
    assert after == 0
