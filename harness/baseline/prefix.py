"""Prefix digests: one chain of SHA-256 per request and rule, so that two captures compare by 32 bytes a request.

It does not know files or verdicts. Rules: companions, steps, counters and timings stay out; a chain covers what its
rule compares and nothing stronger; where two chains part is the first position that differs.

Chain of one request under one rule (little-endian, H = SHA-256):

    h(0)   = H("samebits prefix 1\\n", u8 rule number, u32 length, request id in UTF-8, i32 sample, i32 prompt tokens)
    h(p)   = H(h(p-1), row of position p)         row: i32 token, i32 pick
                                                   from `logprobs` on: u32 logprob bits
                                                   from `topk` on: (i32 id, u32 bits) pairs, trailing padding left out
                                                   `tensors`: 2 x u64 digest of the logits
    end    = H(h(L), "end\\n", finish reason in UTF-8)
    prefix[p] = the first 8 bytes of h(p), as u64
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np

from harness.digest import is_padding
from harness.engine import RULES, Rule
from harness.judged import RequestKey, find_judged
from harness.traces import PositionTable, Traces, UInt64

_MAGIC = b"samebits prefix 1\n"
CHAINED: tuple[Rule, ...] = ("tokens", "logprobs", "topk", "tensors")  # `text` is compared as `tokens`


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Chain:
    """One request's chain: `end` in hexadecimal, `prefix` (L,)."""

    end: str
    prefix: UInt64


Chains = dict[RequestKey, Chain]


def chained_rule(rule: Rule) -> Rule:
    """The rule under which a chain is kept: `text` stands on the tokens it came from."""
    return "tokens" if rule == "text" else rule


def available_rules(table: PositionTable) -> tuple[Rule, ...]:
    """The rules a capture's columns suffice for, weakest first."""
    rules: list[Rule] = ["tokens"]
    if table.logprob is not None:
        rules.append("logprobs")
        if table.topk_ids is not None:
            rules.append("topk")
            if table.logits_digest is not None:
                rules.append("tensors")
    return tuple(rules)


def chains(traces: Traces, rule: Rule) -> Chains:
    """The chain of every judged request. Raises ComparisonError for malformed tables, ValueError for a rule whose
    columns the capture lacks."""
    if rule not in available_rules(traces.positions):
        raise ValueError(f"the capture has no columns for a chain under rule {rule!r}")
    judged = find_judged(traces)
    found: Chains = {}
    for key, row, start, length in zip(
        judged.keys, judged.rows.tolist(), judged.starts.tolist(), judged.lengths.tolist(), strict=True
    ):
        head = _head(rule, key, int(traces.requests.prompt_tokens[row]))
        rows = _rows(traces.positions, slice(start, start + length), rule)
        found[key] = _chain(head, rows, traces.requests.finish_reason[row])
    return found


def first_difference(a: Chain, b: Chain) -> int | None:
    """The first position (counted from 0) at which two chains part; the shorter one's end; None when they are equal.

    Chains that part only in their finish reason part at their last position.
    """
    if a.end == b.end:
        return None
    common = min(len(a.prefix), len(b.prefix))
    apart = np.flatnonzero(a.prefix[:common] != b.prefix[:common])
    if apart.size:
        return int(apart[0])
    return common if len(a.prefix) != len(b.prefix) else common - 1


def _head(rule: Rule, key: RequestKey, prompt_tokens: int) -> bytes:
    name = key.id.encode()
    return hashlib.sha256(
        _MAGIC + bytes([RULES.index(rule)]) + len(name).to_bytes(4, "little") + name
        + key.sample.to_bytes(4, "little", signed=True) + prompt_tokens.to_bytes(4, "little", signed=True)
    ).digest()  # fmt: skip


def _chain(head: bytes, rows: list[bytes], finish_reason: str) -> Chain:
    state, seen = head, []
    for row in rows:
        state = hashlib.sha256(state + row).digest()
        seen.append(state[:8])
    end = hashlib.sha256(state + b"end\n" + finish_reason.encode()).hexdigest()
    return Chain(end=end, prefix=np.frombuffer(b"".join(seen), dtype="<u8").astype(np.uint64))


def _rows(table: PositionTable, part: slice, rule: Rule) -> list[bytes]:
    """The bytes of each position under a rule."""
    level = RULES.index(rule)
    columns = [
        table.token[part].astype("<i4")[:, None].view(np.uint8),
        table.pick[part].astype("<i4")[:, None].view(np.uint8),
    ]
    if level >= RULES.index("logprobs") and table.logprob is not None:
        columns.append(table.logprob[part].view(np.uint32).astype("<u4")[:, None].view(np.uint8))
    fixed = np.concatenate(columns, axis=1)
    rows = [row.tobytes() for row in fixed]
    if level >= RULES.index("topk"):
        rows = [row + pairs for row, pairs in zip(rows, _candidates(table, part), strict=True)]
    if level >= RULES.index("tensors") and table.logits_digest is not None:
        digests = table.logits_digest[part].astype("<u8")
        rows = [row + digest.tobytes() for row, digest in zip(rows, digests, strict=True)]
    return rows


def _candidates(table: PositionTable, part: slice) -> list[bytes]:
    ids, values = table.topk_ids, table.topk_logprobs
    if ids is None or values is None:
        return [b""] * (part.stop - part.start)
    ids, values = np.ascontiguousarray(ids[part]), np.ascontiguousarray(values[part])
    pairs = np.empty((*ids.shape, 2), dtype="<u4")
    pairs[..., 0], pairs[..., 1] = ids.view(np.uint32), values.view(np.uint32)
    real = ~is_padding(ids, values)
    widths = np.where(real, np.arange(1, ids.shape[1] + 1), 0).max(axis=1, initial=0)
    return [row[:width].tobytes() for row, width in zip(pairs, widths.tolist(), strict=True)]
