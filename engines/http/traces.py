"""Writes the harness's trace tables from finished exchanges. It sends nothing.

Rules: a column that some answer lacks is a column the capture lacks; a JSON number becomes the nearest float32, and
one that is neither a float32 nor the shortest decimal of one is counted, for its last bits were lost on the way.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from engines.http.answer import Answer, Offer
from engines.http.company import Stream, build_steps, shared
from engines.http.exchange import Exchange
from engines.http.run import Ran
from harness.traces import NO_TOKEN, Float32, Float64, Int32, PositionTable, RequestTable, Traces

Row = tuple[Exchange, int, Answer]  # an exchange, a sample's index, and its answer


def write_traces(ran: Ran, offer: Offer) -> Traces:
    """The tables of one work; `offer` says which columns there are."""
    rows: list[Row] = [
        (one, index, _cut(one, answer)) for one in ran.exchanges for index, answer in enumerate(one.answers)
    ]
    answers = [answer for _, _, answer in rows]
    start = min(exchange.sent_at for exchange in ran.exchanges)
    streams = [_stream(one, answer) for one, _, answer in rows]
    steps = build_steps(streams, apart=ran.samples.never_together)
    positions, inexact = _positions(answers, offer)
    counters = {"inexact_numbers": inexact, "rows_shared": shared(steps), **ran.samples.counters()}
    return Traces(
        requests=_requests(rows, start), positions=positions, steps=steps, counters=tuple(sorted(counters.items()))
    )


def to_float32(values: Sequence[float]) -> tuple[Float32, int]:
    """The nearest float32s, and how many numbers are neither a float32's value nor its shortest decimal."""
    wide: Float64 = np.array(values, np.float64)
    narrow: Float32 = wide.astype(np.float32)
    suspects = np.flatnonzero(narrow.astype(np.float64) != wide)
    return narrow, sum(float(str(narrow[i])) != wide[i] for i in suspects)


def _stream(exchange: Exchange, answer: Answer) -> Stream:
    """An answer in time; a path that was read is one row, from what was cached to the token before its last."""
    prompt, cached = len(exchange.request.prompt_token_ids), _cached(exchange, answer)
    if not answer.picks:
        return Stream(prompt_tokens=prompt, cached_tokens=cached, times=answer.times)
    return Stream(prompt_tokens=prompt + len(answer.tokens) - 1, cached_tokens=cached, times=answer.times[:1])


def _cached(exchange: Exchange, answer: Answer) -> int:
    return min(answer.cached_tokens or 0, len(exchange.request.prompt_token_ids) - 1)


def _cut(exchange: Exchange, answer: Answer) -> Answer:
    """An answer that was left: the tokens it was to have, whatever came in the same event."""
    if not exchange.left or exchange.leave_after is None:
        return answer
    n = exchange.leave_after
    return Answer(
        candidates=answer.candidates, naming=answer.naming, tokens=answer.tokens[:n], logprobs=answer.logprobs[:n],
        tops=answer.tops[:n], times=answer.times[:n], finish="abort", finished_at=exchange.ended_at,
        prompt_tokens=answer.prompt_tokens, cached_tokens=answer.cached_tokens,
    )  # fmt: skip


def _requests(rows: Sequence[Row], start: float) -> RequestTable:
    prompts = [len(one.request.prompt_token_ids) for one, _, _ in rows]
    read = [len(answer.picks) - 1 if answer.picks else 0 for _, _, answer in rows]  # positions beside a row's own
    proposed = _int32(read) if any(answer.picks for _, _, answer in rows) else None
    return RequestTable(
        id=tuple(one.request.id for one, _, _ in rows),
        sample=_int32([index for _, index, _ in rows]),
        companion=np.array([one.companion for one, _, _ in rows], np.bool_),
        prompt_tokens=_int32(prompts),
        length=np.array([len(answer.tokens) for _, _, answer in rows], np.int64),
        finish_reason=tuple(answer.finish or "abort" for _, _, answer in rows),
        cached_tokens=_int32([_cached(one, answer) for one, _, answer in rows]),
        preemptions=_int32([0] * len(rows)),
        drafted=proposed,
        accepted=proposed,
        rollbacks=None if proposed is None else _int32([0] * len(rows)),
        arrival_s=_seconds([one.sent_at for one, _, _ in rows], start),
        first_token_s=_seconds([answer.times[0] for _, _, answer in rows], start),
        finish_s=_seconds([answer.finished_at for _, _, answer in rows], start),
    )


def _positions(answers: Sequence[Answer], offer: Offer) -> tuple[PositionTable, int]:
    tokens = _int32([token for answer in answers for token in answer.tokens])
    picks = _int32([pick for answer in answers for pick in answer.picks or answer.tokens])
    logprob: Float32 | None = None
    ids: Int32 | None = None
    values: Float32 | None = None
    inexact = 0
    if offer.logprobs:
        logprob, inexact = to_float32([value for answer in answers for value in answer.logprobs])
    if offer.topk:
        ids, values, more = _topk(answers)
        inexact += more
    return (
        PositionTable(
            token=tokens, pick=picks, logprob=logprob, topk_ids=ids, topk_logprobs=values, logits_digest=None
        ),
        inexact,
    )


def _topk(answers: Sequence[Answer]) -> tuple[Int32, Float32, int]:
    """(N, K) ids and logprobs, padded; and how many numbers were no float32."""
    tops = [top for answer in answers for top in (answer.tops or [[]] * len(answer.tokens))]
    width = max((len(top) for top in tops), default=0)
    ids = np.full((len(tops), width), NO_TOKEN, np.int32)
    values = np.full((len(tops), width), np.nan, np.float32)
    inexact = 0
    for row, top in enumerate(tops):
        ids[row, : len(top)] = [token for token, _ in top]
        values[row, : len(top)], lost = to_float32([value for _, value in top])
        inexact += lost
    return ids, values, inexact


def _int32(values: list[int]) -> Int32:
    return np.array(values, np.int32)


def _seconds(times: list[float], start: float) -> Float64:
    return np.array(times, np.float64) - start
