"""Steps, arrivals and tables, on a scripted engine with vLLM's interface. Nothing here needs vLLM."""

import sys
from types import SimpleNamespace

import pytest

from engines import vllm_work
from engines.vllm_steps import StepLog
from engines.vllm_traces import write_traces
from engines.vllm_work import Able, run_work
from harness.claims import check_claims
from harness.corpus import load_corpus, take
from harness.engine import Work
from harness.errors import EngineDied, EngineError, Unsupported
from harness.request import Grammar
from harness.schedules import build_schedule

ABLE = Able(golden=None, trace=False, text=True, max_model_len=64)
CORPUS = take(load_corpus("smoke"), 3)


class Scripted:
    """One scheduler and engine in one: a token per request and step, chunks of 20 prompt tokens, vLLM's names."""

    refusal = ValueError

    def __init__(self, *, breaks_at=None, cached=0, drafts=0, refuses=None):
        self.refuses = refuses
        self.waiting, self.running, self.count = {}, {}, 0
        self.breaks_at, self.cached, self.drafts = breaks_at, cached, drafts
        self.log = StepLog(self)

    def has_unfinished_requests(self):
        return bool(self.running)

    def add_request(self, request, prompt, parameters, *, arrival_time, priority):
        if request == self.refuses:
            raise self.refusal("min_p is not yet supported with speculative decoding")
        internal = f"{request}-x"
        self.running[internal] = SimpleNamespace(
            id=request, prompt=prompt["prompt_token_ids"], parameters=parameters, computed=self.cached, tokens=[],
            fresh=True, arrival_time=arrival_time,
        )  # fmt: skip
        return internal

    def abort_request(self, requests):
        for internal in [i for i, entry in self.running.items() if entry.id in requests]:
            del self.running[internal]

    def schedule(self):
        counts, new, cached, drafts = {}, [], [], {}
        for internal, entry in self.running.items():
            left = len(entry.prompt) - entry.computed
            counts[internal] = min(20, left) if left > 0 else 1 + self.drafts
            if left <= 0 and self.drafts:
                drafts[internal] = [0] * self.drafts
            (new if entry.fresh else cached).append((internal, entry.computed))
            entry.fresh = False
        return SimpleNamespace(
            total_num_scheduled_tokens=sum(counts.values()), num_scheduled_tokens=counts,
            scheduled_new_reqs=[SimpleNamespace(req_id=i, num_computed_tokens=n) for i, n in new],
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=[i for i, _ in cached], num_computed_tokens=[n for _, n in cached], resumed_req_ids=set()
            ),
            scheduled_spec_decode_tokens=drafts,
        )  # fmt: skip

    def update_from_output(self, output, result):
        return None

    def step(self):
        self.count += 1
        if self.count == self.breaks_at:
            raise RuntimeError("CPU Generator does not use offset")
        output = self.schedule()
        told, sampled = [], {}
        for internal, tokens in output.num_scheduled_tokens.items():
            entry = self.running[internal]
            entry.computed += tokens if entry.computed < len(entry.prompt) else 1
            sampled[internal] = []
            if entry.computed >= len(entry.prompt):
                entry.tokens.append(100 + len(entry.tokens))
                sampled[internal] = entry.tokens[-1:]
            done = len(entry.tokens) == entry.parameters.max_tokens
            told.append((internal, self.output(entry, finished=done)))
        result = SimpleNamespace(sampled_token_ids=list(sampled.values()),
                                 req_id_to_index={name: row for row, name in enumerate(sampled)})  # fmt: skip
        self.update_from_output(output, result)
        for internal, answer in told:
            if answer.finished:
                del self.running[internal]
        return [answer for _, answer in told]

    def output(self, entry, *, finished):
        logprobs = [
            {token: SimpleNamespace(logprob=-0.5), 7: SimpleNamespace(logprob=-0.25), 9: SimpleNamespace(logprob=-0.5),
             **{40 + i: SimpleNamespace(logprob=-3.0 - i) for i in range(3)}}
            for token in entry.tokens
        ]  # fmt: skip
        completion = SimpleNamespace(token_ids=list(entry.tokens), logprobs=logprobs,
                                     finish_reason="length" if finished else None)  # fmt: skip
        return SimpleNamespace(
            request_id=entry.id, outputs=[completion], finished=finished, num_cached_tokens=self.cached
        )


@pytest.fixture(autouse=True)
def plain_parameters(monkeypatch):
    """vLLM's own class of parameters is not there; what matters here is max_tokens."""

    def parameters(request, arrival, work, able):
        return SimpleNamespace(
            max_tokens=request.sampling.max_tokens, **vllm_work._forced(request, arrival, work, able)
        )

    monkeypatch.setattr(vllm_work, "parameters_of", parameters)


def make_work(schedule="together", replay="natural", golden=None, requests=CORPUS.requests, companions=()):
    judged = [request.id for request in requests if request.id not in companions]
    cancelled = bool(companions)
    return Work(requests=requests, schedule=build_schedule(schedule, judged, companions, cancelled=cancelled),
                replay=replay, golden=golden or {}, logits_digests=False)  # fmt: skip


def traces_of(engine, work, picks=None, able=ABLE):
    served = run_work(engine, engine.log, work, able, lambda requests, tokens: None)
    speculative = engine.drafts > 0
    return write_traces(served, engine.log, {} if picks is None else picks, speculative=speculative)


def test_the_step_table_is_the_schedulers_and_contradicts_nothing():
    traces = traces_of(Scripted(), make_work())
    assert check_claims(traces) == ()
    prompts = {request.id: len(request.prompt_token_ids) for request in CORPUS.requests}
    assert prompts == dict(zip(traces.requests.id, traces.requests.prompt_tokens.tolist(), strict=True))
    first = [(int(s), int(n)) for r, s, n in zip(traces.steps.request, traces.steps.start, traces.steps.count,
                                                 strict=True) if r == 0][:3]  # fmt: skip
    assert first == [(0, 20), (20, prompts[traces.requests.id[0]] - 20), (prompts[traces.requests.id[0]], 1)]
    assert dict(traces.counters)["max_running"] == 3


def test_alone_means_one_after_another():
    traces = traces_of(Scripted(), make_work("alone"))
    assert dict(traces.counters)["max_running"] == 1
    assert check_claims(traces) == ()


def test_a_cached_prefix_is_where_the_first_row_begins():
    traces = traces_of(Scripted(cached=16), make_work("alone"))
    assert traces.requests.cached_tokens.tolist() == [16] * 3
    assert check_claims(traces) == ()


def test_candidates_are_ordered_by_value_then_id_and_cut_to_what_was_asked_for():
    traces = traces_of(Scripted(), make_work())
    assert traces.positions.topk_ids[0].tolist() == [7, 9, 100, 40, 41]
    assert traces.positions.topk_logprobs[0].tolist() == [-0.25, -0.5, -0.5, -3.0, -4.0]
    assert traces.positions.logprob[0] == -0.5


def test_picks_are_the_tokens_unless_they_were_forced():
    golden = {request.id: (5,) * 16 for request in CORPUS.requests}
    forced = {f"{CORPUS.requests[0].id}-x": dict.fromkeys(range(15), 8)}
    traces = traces_of(Scripted(), make_work(replay="golden", golden=golden), picks=forced)
    assert traces.positions.pick[:16].tolist() == [8] * 15 + [-1]  # a forced position without a pick is not invented
    assert traces.positions.pick[16:32].tolist() == traces.positions.token[16:32].tolist()


def test_golden_paths_travel_with_the_request():
    golden = {request.id: (5,) * 16 for request in CORPUS.requests}
    engine = Scripted()
    run_work(engine, engine.log, make_work(replay="golden", golden=golden), ABLE, lambda requests, tokens: None)
    with pytest.raises(EngineError, match="no golden path was given"):
        traces_of(Scripted(), make_work(replay="golden"))
    refusing = Able(golden="no place to force", trace=False, text=True, max_model_len=64)
    with pytest.raises(Unsupported, match="no place to force"):
        traces_of(Scripted(), make_work(replay="golden", golden=golden), able=refusing)


def test_vllms_trace_replay_is_used_where_the_pick_can_be_read():
    trace = Able(golden=None, trace=True, text=True, max_model_len=64)
    greedy = tuple(request for request in CORPUS.requests if request.sampling.temperature == 0)
    assert greedy
    work = make_work(replay="golden", golden={request.id: (5,) * 16 for request in greedy}, requests=greedy)
    engine = Scripted()
    served = run_work(engine, engine.log, work, trace, lambda requests, tokens: None)
    assert set(write_traces(served, engine.log, None, speculative=False).positions.pick.tolist()) == {7}
    golden = {request.id: (5,) * 16 for request in CORPUS.requests}
    with pytest.raises(Unsupported, match="does not say what its sampler would have picked"):
        traces_of(Scripted(), make_work(replay="golden", golden=golden), able=trace)


def test_a_cancelled_companion_leaves_after_its_tokens():
    ids = [request.id for request in CORPUS.requests]
    traces = traces_of(Scripted(), make_work(companions=(ids[2],)))
    row = traces.requests.id.index(ids[2])
    assert (traces.requests.finish_reason[row], int(traces.requests.length[row])) == ("abort", 1)


def test_rejected_drafts_are_counted():
    traces = traces_of(Scripted(drafts=2), make_work("alone"))
    assert traces.requests.drafted.tolist() == [30, 30, 30]  # two proposals in each of 15 decode steps
    assert traces.requests.accepted.tolist() == [0, 0, 0]
    assert traces.requests.rollbacks.tolist() == [15, 15, 15]
    assert check_claims(traces) == ()


def test_a_failing_step_means_that_the_engine_is_gone():
    with pytest.raises(EngineDied, match="RuntimeError: CPU Generator does not use offset"):
        traces_of(Scripted(breaks_at=4), make_work())


def changed(**fields):
    import dataclasses

    first, *rest = CORPUS.requests
    sampling = {key: value for key, value in fields.items() if hasattr(first.sampling, key)}
    other = {key: value for key, value in fields.items() if key not in sampling}
    first = dataclasses.replace(first, sampling=dataclasses.replace(first.sampling, **sampling), **other)
    return make_work(requests=(first, *rest))


@pytest.mark.parametrize(("fields", "words", "kind"), [
    ({"n": 2}, "n = 2", Unsupported),
    ({"logit_bias": ((3, 120.0),)}, "beyond 100, where vLLM would clamp it", Unsupported),
    ({"grammar": Grammar(kind="regex", text="a*")}, "a grammar", Unsupported),
    ({"max_tokens": 50}, "max_model_len is 64", EngineError),
])  # fmt: skip
def test_what_vllm_would_change_silently_is_refused(fields, words, kind):
    with pytest.raises(kind, match=words):
        traces_of(Scripted(), changed(**fields))


def test_stop_strings_need_a_tokenizer():
    blind = Able(golden=None, trace=False, text=False, max_model_len=64)
    with pytest.raises(Unsupported, match="without a tokenizer"):
        traces_of(Scripted(), changed(stop=("x",)), able=blind)


class RefusalError(Exception):
    """As VLLMValidationError of 0.32: no ValueError."""


@pytest.mark.parametrize("refusal", [ValueError, RefusalError])
def test_what_vllm_refuses_is_said_in_its_words_and_leaves_nothing_behind(refusal, monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm.exceptions", SimpleNamespace(VLLMValidationError=RefusalError))
    engine = Scripted(refuses=CORPUS.requests[2].id)
    engine.refusal = refusal
    with pytest.raises(Unsupported, match="vLLM refuses it: min_p is not yet supported"):
        traces_of(engine, make_work())
    assert not engine.has_unfinished_requests()
