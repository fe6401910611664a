"""transformers on the tiny model, in this process: generate's own numbers, forced tokens, padding, paged batches."""

import numpy as np
import pytest
import torch
from offline_cases import paths, quiet, request, requests, work

from engines.transformers_local import TransformersAdapter
from harness.claims import check_claims
from harness.compare import compare
from harness.errors import EngineDied, EngineError, Unsupported
from harness.expected import expected_of, missing_from
from harness.witness import witnessed

ADAPTER = TransformersAdapter()
STATIC = {"threads": 1, "max_num_seqs": 4}
PAGED = {**STATIC, "batching": "continuous", "page_size": 16, "num_pages": 64, "max_num_batched_tokens": 64,
         "prefix_cache": True}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def torch_state():
    """What a lifetime sets for its process is put back for the tests that follow in this one."""
    threads, strict = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(strict)


@pytest.fixture(scope="module")
def static():
    return ADAPTER.start("tiny", STATIC)


@pytest.fixture(scope="module")
def paged():
    return ADAPTER.start("tiny", PAGED)


def with_settings(engine, **changed):
    """The same loaded model under other settings that only the batches read."""
    import dataclasses

    return dataclasses.replace(engine, settings={**engine.settings, **changed})


def run(engine, *arguments, **options):
    """Traces that contradict nothing and hold what was asked for."""
    given = work(*arguments, **options)
    traces = engine.generate(given, quiet)
    assert check_claims(traces) == ()
    judged = [one.request for one in given.schedule.arrivals if not one.companion]
    assert missing_from(traces, expected_of(given.requests, judged, given.schedule)) == ()
    return traces


def test_a_batch_has_generates_own_numbers(static):
    """Judged against transformers' own `generate`, asked for its logits."""
    rows = requests()[1:]
    columns = max(len(row.prompt_token_ids) for row in rows)
    ids, mask = torch.zeros((3, columns), dtype=torch.long), torch.zeros((3, columns), dtype=torch.long)
    for index, row in enumerate(rows):
        ids[index, columns - len(row.prompt_token_ids) :] = torch.tensor(row.prompt_token_ids)
        mask[index, columns - len(row.prompt_token_ids) :] = 1
    theirs = static.model.generate(
        input_ids=ids, attention_mask=mask, max_new_tokens=6, do_sample=False, output_logits=True, pad_token_id=0,
        return_dict_in_generate=True,
    )  # fmt: skip
    first = request("first", 9)
    ours = run(static, (first, *rows), digests=True)
    assert [paths(ours)[row.id] for row in rows] == [tuple(row.tolist()) for row in theirs.sequences[:, columns:]]
    logprobs = torch.log_softmax(torch.stack(theirs.logits, 1), -1)  # (B, T, V)
    chosen = logprobs.gather(-1, theirs.sequences[:, columns:, None])[..., 0].numpy()
    assert ours.positions.logprob[6:].view(np.int32).tolist() == chosen.reshape(-1).view(np.int32).tolist()
    assert ours.positions.logits_digest is not None


def test_the_steps_say_who_ran_beside_whom(static):
    traces = run(static, requests())
    sizes = np.bincount(traces.steps.step)
    assert sizes[:6].tolist() == [1] * 6  # the first had arrived alone
    assert set(sizes[6:].tolist()) == {3}


def test_seats_bound_a_batch(static):
    traces = run(with_settings(static, max_num_seqs=2), requests())
    assert max(np.bincount(traces.steps.step)) == 2


def test_alone_and_padded_differ_and_the_same_batch_does_not(static):
    alone = run(static, requests(), schedule="alone")
    golden = paths(alone)
    batch = run(static, requests(), golden=golden)
    again = run(static, requests(), golden=golden)
    assert compare(batch, again, "topk", "golden").outcome == "same"
    found = compare(alone, batch, "topk", "golden")
    assert found.outcome == "different"
    assert int(witnessed(alone, batch, "beside").mask.sum()) == 18  # all but the first request's
    assert batch.requests.id == tuple(golden)


def test_padding_is_read_from_the_mask_and_changes_bits(static):
    plain = run(static, requests(), schedule="alone")
    assert static.observed()["padding"] == 0
    padded = with_settings(static, padding=61)
    shifted = run(padded, requests(), schedule="alone", golden=paths(plain))
    assert padded.observed()["padding"] == 61
    assert compare(plain, shifted, "topk", "golden").outcome == "different"


def test_golden_tokens_come_out_and_the_pick_is_the_engines(static):
    own = paths(run(static, requests(), schedule="alone"))
    forced = {name: tuple((token + 1) % 256 for token in tokens) for name, tokens in own.items()}
    traces = run(static, requests(), schedule="alone", golden=forced)
    assert paths(traces) == forced
    first = np.cumsum(traces.requests.length) - traces.requests.length
    assert traces.positions.pick[first].tolist() == [own[name][0] for name in traces.requests.id]


def test_prefill_in_chunks_shows_in_the_steps(static):
    plain = run(static, requests(), schedule="alone")
    chunked = run(with_settings(static, max_num_batched_tokens=32), requests(), schedule="alone", golden=paths(plain))
    rows = chunked.steps.count[(chunked.steps.request == 2) & (chunked.steps.count > 1)]
    assert rows.tolist() == [32, 32, 26]
    assert int(witnessed(plain, chunked, "chunks").mask.sum()) > 0


def test_a_chunked_padded_batch_counts_each_rows_own_tokens(static):
    traces = run(with_settings(static, max_num_batched_tokens=60), requests())
    counts = traces.steps.count[traces.steps.request == 1].tolist()  # 5 tokens behind 85 masked ones
    assert sum(counts) == 5 + 5


def test_a_path_read_as_a_prompt_is_witnessed_and_close(static):
    plain = run(static, requests(), schedule="alone")
    read = run(with_settings(static, scoring="prefill"), requests(), schedule="alone", golden=paths(plain))
    assert int(witnessed(plain, read, "drafts").mask.sum()) > 0
    assert np.allclose(plain.positions.logprob, read.positions.logprob, atol=1e-4)
    assert plain.positions.pick.tolist() == read.positions.pick.tolist()


def test_seeds_decide_draws_and_company_does_not(static):
    hot = requests(temperature=1.5, seed=7, top_k=50, top_p=0.9, min_p=0.01)
    one = run(static, hot, schedule="alone")
    assert paths(one) == paths(run(static, hot, schedule="alone"))
    other = requests(temperature=1.5, seed=8, top_k=50, top_p=0.9, min_p=0.01)
    assert paths(one) != paths(run(static, other, schedule="alone"))


def test_penalties_bias_and_stops_are_transformers_own(static):
    plain = paths(run(static, requests(), schedule="alone"))
    biased = paths(run(static, requests(logit_bias=((77, 1000.0),)), schedule="alone"))
    assert all(tokens == (77,) * 6 for tokens in biased.values())
    stops = requests(logit_bias=((77, 1000.0),), stop_token_ids=(77,), min_tokens=3)
    stopped = run(static, stops, schedule="alone")
    assert stopped.requests.finish_reason == ("stop",) * 4
    assert stopped.requests.length.tolist() == [4] * 4  # three others first, then the biased one
    assert paths(run(static, requests(repetition_penalty=1.8), schedule="alone")) != plain


def test_the_models_own_defaults_end_no_request_that_ignores_them(static, paged):
    (eos,) = static.eos_ids
    for engine in (static, paged):
        on = run(engine, requests(logit_bias=((eos, 1000.0),)))
        assert (set(on.requests.finish_reason), on.requests.length.tolist()) == ({"length"}, [6] * 4)
        off = run(engine, requests(logit_bias=((eos, 1000.0),), ignore_eos=False))
        assert (set(off.requests.finish_reason), off.requests.length.tolist()) == ({"stop"}, [1] * 4)


def test_a_companion_leaves_when_it_was_to(static, paged):
    those = (*requests(), request("c", 11, max_tokens=20))
    for engine in (static, paged):
        traces = run(engine, those, companions=("c",))
        row = traces.requests.id.index("c")
        assert (traces.requests.finish_reason[row], traces.requests.length[row]) == ("abort", 1)


@pytest.mark.parametrize("changed", [
    {"n": 2}, {"stop": ("x",)}, {"frequency_penalty": 0.5}, {"presence_penalty": 0.5},
])  # fmt: skip
def test_what_transformers_lacks_is_refused(static, changed):
    with pytest.raises(Unsupported, match="r0"):
        static.generate(work(requests(**changed)), quiet)


def test_a_request_beyond_the_context_is_an_error(static):
    with pytest.raises(EngineError, match="context holds 8192"):
        static.generate(work((request("long", 8190),)), quiet)


def test_a_golden_replay_without_a_path_is_an_error(static):
    with pytest.raises(EngineError, match=r"'r1'.*no golden path"):
        static.generate(work(requests(), golden={"r0": (1,), "r2": (1,), "r3": (1,)}), quiet)


def test_a_row_that_is_no_number_names_request_and_position(static):
    weight = static.model.lm_head.weight
    kept = weight.data.clone()
    try:
        weight.data[3, 0] = torch.nan
        with pytest.raises(EngineError, match="'r0' position 0"):
            static.generate(work(requests(), schedule="alone"), quiet)
    finally:
        weight.data.copy_(kept)


def test_paged_batches_let_requests_join_and_differ_from_alone(paged):
    resolved = paged.resolved()
    assert (resolved["page_size"], resolved["max_num_batched_tokens"], resolved["batching"]) == (16, 64, "continuous")
    alone = run(paged, requests(), schedule="alone")
    batch = run(paged, requests(), golden=paths(alone))
    sizes = np.bincount(batch.steps.step)
    assert sizes[0] == 1
    assert max(sizes) == 4
    assert int(witnessed(alone, batch, "beside").mask.sum()) > 0
    assert compare(alone, batch, "topk", "golden").outcome == "different"  # in the last bits,
    assert np.allclose(alone.positions.logprob, batch.positions.logprob, atol=1e-4)  # and there alone
    assert paths(run(paged, requests())) == paths(alone)


def test_a_prompt_found_in_the_pages_is_told_as_cached(paged):
    fresh = request("warm", 60)
    cold, warm = run(paged, (fresh,)), run(paged, (fresh,))
    assert cold.requests.cached_tokens.tolist() == [0]
    assert warm.requests.cached_tokens.tolist() == [48]  # whole pages of 16
    assert paths(cold) == paths(warm)


def test_a_request_that_is_started_over_for_want_of_pages_ends_the_engine():
    small = ADAPTER.start("tiny", {**PAGED, "num_pages": 12, "prefix_cache": False})
    with pytest.raises(EngineDied, match="raise num_pages"):
        small.generate(work(tuple(request(f"w{i}", 40, max_tokens=30) for i in range(4))), quiet)
    with pytest.raises(EngineDied, match="failed before"):
        small.generate(work(requests()), quiet)


def test_static_and_paged_pick_the_same_tokens(static, paged):
    assert paths(run(static, requests(), schedule="alone")) == paths(run(paged, requests(), schedule="alone"))


def test_eager_is_a_backend_of_its_own(static):
    eager = ADAPTER.start("tiny", {**STATIC, "attention_backend": "eager"})
    assert eager.observed()["attention_backend"] == "eager"
    assert static.observed()["attention_backend"] == "sdpa"
    assert paths(run(eager, requests())) == paths(run(static, requests()))


def test_requested_resolved_and_observed_are_three_readings(static):
    assert static.resolved()["dtype"] == static.observed()["dtype"] == "float32"
    assert static.observed()["threads"] == 1
    assert static.observed()["invariant_operators"] == "none"
    names = {field.name: field.value for field in static.fingerprint()}
    assert str(names["model.weights"]).startswith("sha256:")
    assert names["package.transformers"]
