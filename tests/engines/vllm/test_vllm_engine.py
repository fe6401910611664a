"""One real vLLM process: tables, forced tokens, caches, refusals, and what a fault leaves behind."""

import numpy as np
import pytest
from vllm_cases import Process, with_sampling

from harness.claims import check_claims
from harness.compare import compare
from harness.corpus import load_corpus, take
from harness.digest import judged_keys, request_digests
from harness.lifetime import LifetimeError

pytestmark = [pytest.mark.usefixtures("vllm"), pytest.mark.xdist_group("vllm")]

SETTINGS = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "page_size": 32, "prefix_cache": True, "threads": 1,
            "split_kv": False, "pad_single_rows": True, "fixed_tiles": True, "order_ties": True}  # fmt: skip
REQUESTS = tuple(
    with_sampling(request, max_tokens=6, logprobs=20) for request in take(load_corpus("smoke"), 4).requests
)  # 22 to 26 prompt tokens each, two of them seeded
LONG = take(load_corpus("quick:greedy"), 1).requests  # 300 prompt tokens: five chunks


@pytest.fixture(scope="module")
def engine(vllm, tmp_path_factory):
    with Process(tmp_path_factory.mktemp("vllm"), "smollm2", SETTINGS) as process:
        yield process


@pytest.fixture(scope="module")
def natural(engine):
    return engine.capture(REQUESTS, reset=True).traces


def paths(traces):
    """Request to its tokens."""
    ends = np.cumsum(traces.requests.length)
    return {
        name: traces.positions.token[end - length : end].tolist()
        for name, end, length in zip(traces.requests.id, ends, traces.requests.length, strict=True)
    }


def test_requested_resolved_and_observed_are_three_readings(engine):
    resolved, observed = engine.started["resolved"], engine.started["observed"]
    assert (resolved["page_size"], resolved["max_num_seqs"], resolved["prefix_cache"]) == (32, 4, True)
    assert (resolved["forcing"], resolved["logprobs_mode"]) == ("sampler", "raw_logprobs")
    assert resolved["num_pages"] > 100
    assert (observed["attention_backend"], observed["threads"], observed["dtype"]) == ("CPU_ATTN", 1, "torch.bfloat16")
    assert observed["attention_isa"] in ("vec", "amx")  # a CPU build's own name for its kernel
    fields = {field["name"]: field["value"] for field in engine.started["subject"]}
    assert fields["package.vllm"]
    assert fields["package.vllm.native"].startswith("sha256:")
    assert fields["model.weights"].startswith("sha256:")
    assert fields["env.VLLM_CPU_ATTN_SPLIT_KV"] == "0"
    assert fields["lineage.cache"] == "as left"


def test_the_tables_are_whole_and_contradict_nothing(natural):
    assert check_claims(natural) == ()
    assert natural.requests.length.tolist() == [6] * 4
    assert natural.positions.topk_ids.shape == (24, 20)
    assert np.isfinite(natural.positions.topk_logprobs).all()
    assert natural.positions.pick.tolist() == natural.positions.token.tolist()
    assert dict(natural.counters)["max_running"] == 4


def test_alone_is_together_in_this_mode_and_one_row_was_padded(engine, natural):
    alone = engine.capture(REQUESTS, "alone", golden=paths(natural), reset=True)
    assert compare(natural, alone.traces, "topk", "golden").outcome == "same"
    assert dict(alone.traces.counters)["max_running"] == 1
    assert alone.observed["padded_rows"] > 0


def test_what_a_companion_wants_reported_changes_no_others_candidates(engine):
    """Without order_ties the fifth of five candidates follows how many a companion asks for."""
    five = with_sampling(REQUESTS[0], max_tokens=12, logprobs=5)
    alone = engine.capture((five,), reset=True)
    ids = alone.traces.positions.topk_ids[:, :5]
    together = engine.capture((five, REQUESTS[3]), reset=True)  # which wants 20
    assert together.traces.positions.topk_ids[:12, :5].tolist() == ids.tolist()
    assert together.observed["reordered_candidates"] > alone.observed["reordered_candidates"]


def test_a_timed_answer_is_the_untimed_one_whoever_is_served_beside_it(engine):
    greedy = tuple(with_sampling(request, temperature=0.0, seed=None, top_k=0, top_p=1.0, max_tokens=8, logprobs=wanted)
                   for request, wanted in zip(REQUESTS, (5, 20, 1, 2), strict=True))  # fmt: skip
    alone = engine.capture(greedy, "alone", reset=True).traces
    reference = dict(zip(judged_keys(alone), request_digests(alone), strict=True))
    timings = engine.serve(greedy, 3, 8)
    assert len(timings) == 8
    assert [one.request for one in timings if one.judged != reference[one.request, 0]] == []


def test_a_foreign_path_is_followed_and_the_engines_own_picks_are_kept(engine, natural):
    own = paths(natural)
    foreign = {name: tokens[::-1] for name, tokens in own.items()}
    forced = engine.capture(REQUESTS, golden=foreign, reset=True).traces
    assert paths(forced) == foreign
    assert check_claims(forced) == ()
    picks, tokens = forced.positions.pick.reshape(4, 6), forced.positions.token.reshape(4, 6)
    first = [own[name][0] for name in forced.requests.id]
    assert picks[:, 0].tolist() == first  # nothing was forced before it, so the sampler is where it was
    assert (picks != tokens).any(axis=1).all()
    for row in range(4):  # the first distribution is the same, whatever is emitted
        np.testing.assert_array_equal(
            forced.positions.topk_logprobs.view(np.int32)[6 * row],
            natural.positions.topk_logprobs.view(np.int32)[6 * row],
        )


def test_a_cached_prefix_is_witnessed_and_a_reset_empties_it(engine):
    cold = engine.capture(LONG, reset=True)
    warm = engine.capture(LONG)
    again = engine.capture(LONG, reset=True)
    assert [int(capture.traces.requests.cached_tokens[0]) for capture in (cold, warm, again)] == [0, 288, 0]
    assert check_claims(warm.traces) == ()
    assert int(warm.traces.steps.start[0]) == 288
    states = [next(f.value for f in c.subject if f.name == "lineage.cache") for c in (cold, warm, again)]
    assert states == ["emptied", "as left", "emptied"]


def test_fewer_candidates_and_none(engine):
    few = (with_sampling(REQUESTS[0], logprobs=2), with_sampling(REQUESTS[3], logprobs=0))
    traces = engine.capture(few, reset=True).traces
    assert traces.positions.topk_ids.shape == (12, 2)
    assert (traces.positions.topk_ids[6:] == -1).all()
    assert np.isfinite(traces.positions.logprob).all()


def test_a_companion_is_cancelled_in_mid_stream(engine):
    traces = engine.capture(REQUESTS[:2], companions=(REQUESTS[1].id,), reset=True).traces
    row = traces.requests.id.index(REQUESTS[1].id)
    assert (traces.requests.finish_reason[row], int(traces.requests.length[row])) == ("abort", 1)
    assert check_claims(traces) == ()


def test_a_refusal_leaves_the_engine_running(engine, natural):
    with pytest.raises(LifetimeError, match="n = 2") as refused:
        engine.capture((with_sampling(REQUESTS[1], n=2),))
    assert (refused.value.failure.kind, refused.value.dead) == ("unsupported", False)
    again = engine.capture(REQUESTS, reset=True).traces
    assert compare(natural, again, "topk", "natural").outcome == "same"


def test_a_seeded_request_in_chunks_kills_the_engine_and_its_words_are_kept(engine):
    """Known of vLLM 0.32.0's CPU build; the last test of this process, which is gone afterwards."""
    seeded = tuple(with_sampling(request, temperature=0.8, seed=1) for request in LONG)
    with pytest.raises(LifetimeError, match="RuntimeError: CPU Generator does not use offset") as died:
        engine.capture(seeded)
    assert died.value.dead
    assert any("set_offset" in line for line in died.value.failure.log_tail)
