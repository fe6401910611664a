"""The engine over a scripted arithmetic whose logits are a hash of the tokens found in the pages."""

import dataclasses
import hashlib

import numpy as np
import pytest
from engine_cases import (
    SMALL,
    ScriptedArithmetic,
    evidence,
    greedy,
    kernels,
    options,
    request,
    run_all,
    scripted_engine,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.bundled.engine import UNUSED_PAGE, build_batch
from engines.bundled.errors import ComputeError, RequestError
from engines.bundled.scheduler import Slice
from engines.bundled.sequence import Sequence

SEEDED = greedy(temperature=0.9, seed=11, top_p=0.95, repetition_penalty=1.2, max_tokens=12, logprobs=4)


def run_one(one, **changes):
    return run_all(scripted_engine(options(**changes)), [one])[0]


# What a request gets


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_a_request_gets_the_same_alone_and_in_any_company(data):
    """Random prompts, sampling, arrivals, seats, chunks, pages and page order; small pools, so that many preempt."""
    count = data.draw(st.integers(1, 6))
    tokens = st.lists(st.integers(0, SMALL.vocab_size - 1), min_size=1, max_size=20)
    sampling = st.sampled_from([greedy(max_tokens=6), SEEDED, greedy(max_tokens=9, ignore_eos=False)])
    requests = [request(f"r{i}", data.draw(tokens), data.draw(sampling), logits_digest=True) for i in range(count)]
    page_size = data.draw(st.integers(1, 6))
    least = max(-(-one.most_tokens // page_size) for one in requests)
    config = options(
        max_num_seqs=data.draw(st.integers(1, 5)),
        max_num_batched_tokens=data.draw(st.integers(1, 24)),
        page_size=page_size,
        num_pages=least + data.draw(st.integers(0, 6)),
    )
    order = data.draw(st.permutations(range(config.num_pages)))
    arrivals = [data.draw(st.integers(0, 12)) for _ in requests]
    together = run_all(scripted_engine(config, page_order=order), requests, arrivals)
    for one, sequence in zip(requests, together, strict=True):
        assert evidence(sequence) == evidence(run_one(one))


def test_preemption_recomputes_and_loses_nothing():
    requests = [request(f"r{i}", range(i + 1, i + 8), greedy(max_tokens=20)) for i in range(4)]
    engine = scripted_engine(options(num_pages=8))
    together = run_all(engine, requests)
    assert engine.scheduler.preemptions > 0
    assert sum(sequence.preemptions for sequence in together) == engine.scheduler.preemptions
    assert [evidence(s) for s in together] == [evidence(run_one(one)) for one in requests]


def test_prefill_and_decode_share_a_step():
    engine = scripted_engine()
    run_all(engine, [request("a", [1, 2]), request("b", range(30))], [0, 1])
    shared = {ran.step for ran in engine.log if ran.count == 1} & {ran.step for ran in engine.log if ran.count > 1}
    assert shared


def test_the_step_log_covers_every_token_once_without_preemption():
    engine = scripted_engine()
    (a, b) = run_all(engine, [request("a", range(21)), request("b", [5, 6])])
    for sequence in (a, b):
        ran = [ran for ran in engine.log if ran.sequence is sequence]
        assert [row.start for row in ran] == [sum(r.count for r in ran[:i]) for i in range(len(ran))]
        assert sum(row.count for row in ran) == len(sequence.tokens) - 1  # the last token is never computed
    assert engine.most_running == 2


def test_reported_positions_are_raw_logits():
    engine = scripted_engine()
    sampling = greedy(logit_bias=((9, 50.0),), logprobs=4, max_tokens=1)
    (sequence,) = run_all(engine, [request("a", [3, 1], sampling, logits_digest=True)])
    logits = ScriptedArithmetic(SMALL, options())._logits((3, 1))
    logprobs = kernels().log_softmax(logits[np.newaxis])[0]
    position = sequence.positions[0]
    order = sorted(range(SMALL.vocab_size), key=lambda i: (-logits[i], i))[:4]
    assert position.token == position.pick == 9
    assert np.float32(position.logprob).tobytes() == logprobs[9].tobytes()
    assert position.topk_ids.tolist() == order
    assert position.topk_logprobs.tobytes() == logprobs[order].tobytes()
    assert position.digest == hashlib.blake2b(logits.tobytes(), digest_size=16).digest()


def test_without_the_wish_there_is_no_digest_and_no_top_k():
    sequence = run_one(request("a", [1], greedy(logprobs=0)))
    assert sequence.positions[0].digest is None
    assert sequence.positions[0].topk_ids.shape == (0,)


def test_samples_of_a_request_differ_and_repeat():
    both = [request("a", [1, 2], SEEDED, sample=sample) for sample in (0, 1)]
    first, second = run_all(scripted_engine(), both)
    assert first.tokens != second.tokens
    assert evidence(run_one(both[1])) == evidence(second)


# Golden replay


def test_a_forced_path_reports_what_the_sampler_would_have_picked():
    natural = run_one(request("a", [4, 4, 2], SEEDED))
    path = tuple(natural.tokens[3:])
    forced = run_one(request("a", [4, 4, 2], SEEDED, forced=path))
    assert evidence(forced) == evidence(natural)
    other = tuple((token + 1) % SMALL.vocab_size for token in path)
    bent = run_one(request("a", [4, 4, 2], SEEDED, forced=other))
    assert [p.token for p in bent.positions] == list(other)
    assert bent.positions[0].pick == path[0]
    assert bent.positions[0].logprob != natural.positions[0].logprob


def test_forced_tokens_and_not_the_picks_count_as_output_for_penalties():
    """`first` would not be picked at first, and would be picked right after itself were it not penalised."""
    logits = ScriptedArithmetic(SMALL, options())._logits
    prompt, first = next(
        (p, t) for p in range(60) for t in range(60) if logits((p, t)).argmax() == t != logits((p,)).argmax()
    )
    plain, penalised = (
        run_one(request("a", [prompt], greedy(presence_penalty=penalty), forced=(first, first)))
        for penalty in (0.0, 1000.0)
    )
    assert plain.positions[1].pick == first
    assert penalised.positions[1].pick != first
    assert penalised.positions[0].pick == plain.positions[0].pick != first


def test_a_forced_path_is_followed_past_stop_tokens_and_ends_where_it_ends():
    sampling = greedy(ignore_eos=False, max_tokens=8)
    assert run_one(request("a", [1], sampling, forced=(7, 3, 7))).finish_reason == "stop"
    short = run_one(request("a", [1], sampling, forced=(7, 3)))
    assert (short.generated, short.finish_reason) == (2, "length")


# Stopping


def natural_tokens(count):
    return run_one(request("a", [1], greedy(max_tokens=count))).tokens[1:]


def test_max_tokens_ends_with_length():
    sequence = run_one(request("a", [1], greedy(max_tokens=5)))
    assert (sequence.generated, sequence.finish_reason) == (5, "length")


def test_stop_ids_end_with_stop_and_stay_in_the_output():
    third = natural_tokens(8)[2]
    sequence = run_one(request("a", [1], greedy(stop_token_ids=(third,))))
    assert sequence.finish_reason == "stop"
    assert sequence.tokens[1:] == natural_tokens(8)[: natural_tokens(8).index(third) + 1]


def test_eos_ends_unless_it_is_ignored():
    third = natural_tokens(8)[2]
    model = dataclasses.replace(SMALL, eos_token_ids=(third,))
    ending, ignoring = run_all(
        scripted_engine(model=model),
        [request("a", [1], greedy(ignore_eos=False)), request("b", [1], greedy(ignore_eos=True))],
    )
    assert ending.finish_reason == "stop"
    assert ending.generated < ignoring.generated == 8


def test_stop_strings_end_across_tokens():
    tokens = natural_tokens(8)
    text = "".join(chr(65 + token) for token in tokens[2:4])
    sequence = run_one(request("a", [1], greedy(stop=("never", text))))
    assert (sequence.tokens[1:], sequence.finish_reason) == (tokens[:4], "stop")


def test_min_tokens_keep_stop_ids_away_and_stop_strings_waiting():
    tokens = natural_tokens(8)
    kept = run_one(request("a", [1], greedy(min_tokens=5, stop_token_ids=(tokens[2],))))
    assert tokens[2] not in kept.tokens[1:6]
    waiting = run_one(request("a", [1], greedy(min_tokens=5, stop=(chr(65 + tokens[1]),))))
    assert (waiting.generated, waiting.finish_reason) == (5, "stop")


# Errors


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_logits_that_are_no_numbers_name_request_position_and_token(value):
    engine = scripted_engine()
    healthy = request("fine", [1, 2])
    spoiled = run_one(request("bad", [3]))
    arithmetic = engine.arithmetic
    logits = arithmetic._logits(tuple(spoiled.tokens[:3])).copy()
    logits[17] = value
    arithmetic.spoil[tuple(spoiled.tokens[:3])] = logits
    with pytest.raises(ComputeError, match=rf"request 'bad', generated position 2: logit of token 17 is {value}"):
        run_all(engine, [healthy, request("bad", [3])])


def test_the_wrong_number_of_rows_is_an_error():
    engine = scripted_engine()
    engine.arithmetic.forward = lambda batch: np.zeros((2, SMALL.vocab_size), np.float32)
    with pytest.raises(ComputeError, match=r"shape \(2, 61\), expected \(1, 61\)"):
        run_all(engine, [request("a", [1])])


def test_pages_that_are_not_given_back_are_found():
    engine = scripted_engine()
    engine.scheduler.pages.allocate(2)
    with pytest.raises(ComputeError, match="2 of 32 KV pages are still held"):
        engine.check_pages()


REFUSED = [
    (request("a", []), "prompt is empty"),
    (request("a", [1, 61]), "prompt token 1 is 61, outside the vocabulary of 61"),
    (request("a", [-1]), "prompt token 0 is -1"),
    (request("a", [1] * 128), "prompt has 128 tokens, longer than the context of 128"),
    (request("a", [1] * 125), "prompt of 125 and output of 8 tokens exceed the context of 128"),
    (request("a", [1], forced=()), "forced path is empty"),
    (request("a", [1], forced=(1,) * 9), "forced path has 9 tokens, max_tokens allows 8"),
    (request("a", [1], forced=(1, 99)), "forced token 1 is 99"),
    (request("a", [1], greedy(temperature=0.5)), "needs a seed"),
    (request("a", [1], greedy(temperature=float("nan"))), "temperature: expected 0, or a finite number"),
    (request("a", [1], greedy(temperature=-1.0)), "temperature: expected"),
    (request("a", [1], greedy(temperature=1e-40, seed=1)), "temperature: expected"),
    (request("a", [1], greedy(top_p=0.0)), "top_p: expected a number in"),
    (request("a", [1], greedy(top_p=float("nan"))), "top_p"),
    (request("a", [1], greedy(top_k=-1)), "top_k: expected 0"),
    (request("a", [1], greedy(min_p=1.5)), "min_p"),
    (request("a", [1], greedy(repetition_penalty=0.0)), "repetition_penalty: expected a finite number > 0"),
    (request("a", [1], greedy(frequency_penalty=float("inf"))), "frequency_penalty"),
    (request("a", [1], greedy(presence_penalty=float("nan"))), "presence_penalty"),
    (request("a", [1], greedy(max_tokens=0)), "max_tokens: expected 1"),
    (request("a", [1], greedy(min_tokens=9)), "min_tokens: expected 0 to max_tokens, got 9"),
    (request("a", [1], greedy(logprobs=21)), "logprobs: expected 0 to 20"),
    (request("a", [1], greedy(seed=2**64)), "seed: expected an unsigned 64-bit"),
    (request("a", [1], greedy(stop=("",))), "stop: expected strings of at least one"),
    (request("a", [1], greedy(stop_token_ids=(61,))), "stop_token_ids entry 0 is 61"),
    (request("a", [1], greedy(logit_bias=((61, 1.0),))), "logit_bias entry 0 is 61"),
    (request("a", [1], greedy(logit_bias=((3, 1.0), (3, 2.0)))), "names a token twice"),
    (request("a", [1], greedy(logit_bias=((3, float("nan")),))), "logit_bias of 3 is nan"),
]


@pytest.mark.parametrize(("one", "message"), REFUSED, ids=[message[:30] for _, message in REFUSED])
def test_what_cannot_run_is_refused_by_name(one, message):
    engine = scripted_engine()
    with pytest.raises(RequestError, match=message) as caught:
        engine.submit(one)
    assert str(caught.value).startswith("request 'a': ")
    assert not engine.has_work


def test_a_request_the_pool_can_never_hold_is_refused_and_the_largest_that_fits_runs():
    engine = scripted_engine(options(num_pages=4))
    with pytest.raises(RequestError, match="KV pages for 17 tokens, more than the whole pool of 4 pages of 4"):
        engine.submit(request("big", [1] * 10))
    (fits,) = run_all(engine, [request("fits", [1] * 9)])
    assert fits.generated == 8


# Steps as the arithmetic sees them


def test_a_batch_lists_tokens_positions_pages_and_wanted_rows():
    one, two = (Sequence(request(n, p), frozenset(), str) for n, p in (("a", [5, 6, 7]), ("b", [8])))
    one.pages, two.pages = [3, 1], [2]
    batch = build_batch([Slice(one, 0, 2), Slice(two, 0, 1)])
    assert batch.token.tolist() == [5, 6, 8]
    assert batch.sequence.tolist() == [0, 0, 1]
    assert batch.position.tolist() == [0, 1, 0]
    assert batch.page_table.tolist() == [[3, 1], [2, UNUSED_PAGE]]
    assert batch.wanted.tolist() == [2]
    assert {a.dtype for a in (batch.token, batch.sequence, batch.position, batch.page_table, batch.wanted)} == {
        np.dtype(np.int32)
    }


def test_reset_forgets_everything():
    engine = scripted_engine()
    engine.submit(request("a", range(30)))
    engine.step()
    engine.reset()
    assert not engine.has_work
    assert (engine.step_index, engine.log, engine.most_running, engine.scheduler.preemptions) == (0, [], 0, 0)
    engine.check_pages()


# What leaves before its end


def test_an_aborted_request_gives_its_pages_back_and_the_others_get_what_they_get_alone():
    """Aborted while it runs, while it waits, and with several samples; the pool is full of stale pages then."""
    config = options(max_num_seqs=3, num_pages=16)
    names = [("a", 0), ("b", 0), ("b", 1), ("c", 0), ("d", 0)]
    requests = [request(n, range(1, 9), SEEDED, sample=s, logits_digest=True) for n, s in names]
    engine = scripted_engine(config)
    sequences = [engine.submit(one) for one in requests]
    for _ in range(4):
        engine.step()
    assert [engine.abort(name) for name in ("b", "d", "b", "nobody")] == [2, 1, 0, 0]
    assert {piece.request.id for piece in engine.scheduler.unfinished} == {"a", "c"}
    while engine.has_work:
        engine.step()
    engine.check_pages()
    for index in (0, 3):
        assert evidence(sequences[index]) == evidence(run_one(requests[index]))
    assert [sequences[index].finish_reason for index in (1, 2, 4)] == [None] * 3
    assert engine.abort("a") == 0, "it is over"


def test_after_a_step_that_raised_the_others_go_on_as_if_nothing_had_been():
    engine = scripted_engine(options(max_num_seqs=4))
    requests = [request(n, [i, 2, 3], SEEDED, logits_digest=True) for i, n in enumerate(("a", "bad", "c"))]
    expected = [evidence(run_one(one)) for one in requests]
    sequences = [engine.submit(one) for one in requests]
    engine.step()
    arithmetic = engine.arithmetic
    arithmetic.spoil[tuple(sequences[1].tokens)] = np.full(SMALL.vocab_size, np.nan, np.float32)
    with pytest.raises(ComputeError) as caught:
        engine.step()
    assert caught.value.request_id == "bad"
    engine.recover()
    assert engine.scheduler.pages.free == engine.scheduler.pages.count
    assert engine.abort("bad") == 1
    while engine.has_work:
        engine.step()
    engine.check_pages()
    assert [evidence(sequences[index]) for index in (0, 2)] == [expected[index] for index in (0, 2)]


def test_a_sequence_that_finished_in_the_step_that_raised_stays_finished():
    """Parameters that leave no candidate fail after the sequences before them were served."""
    engine = scripted_engine()
    first = engine.submit(request("first", [1, 2], greedy(max_tokens=1)))
    every = greedy(stop_token_ids=tuple(range(SMALL.vocab_size)), min_tokens=1)
    engine.submit(request("bad", [1, 2], every))
    with pytest.raises(ComputeError, match="request 'bad', generated position 0: the largest logit") as caught:
        engine.step()
    assert caught.value.request_id == "bad"
    engine.recover()
    assert engine.abort("bad") == 1
    assert (first.finish_reason, first.generated) == ("length", 1)
    assert not engine.has_work
    engine.check_pages()
    assert engine.observed_rows == 1  # the other's log-probabilities were not read


def test_log_probabilities_that_nobody_observes_are_not_counted():
    engine = scripted_engine(options(observer="none"))
    run_all(engine, [request("r", [1, 2])])
    assert engine.observed_rows == 0
