"""The same request gets the same bits alone, among others, over HTTP and in process."""

import threading

import pytest
from serving import ADAPTER, SMALL, ask, bits, joined, metrics, running, streaming, wait_for

from harness.engine import Work
from harness.request import Request, Sampling
from harness.schedule import Arrival, Schedule

CLIENTS = 16
LEAVING = {1: 3, 4: 17, 6: 40, 9: 8, 12: 60}  # client to the chunks after which it hangs up
TOP = 5


def body_of(client):
    """Prompts of 3 to 150 tokens, greedy and seeded, some with penalties, all 90 tokens long."""
    return {
        "model": "tiny",
        "prompt": [(client * 7 + place * (client + 3)) % 256 for place in range(3 + 11 * (client % 14))],
        "temperature": 0 if client % 3 == 0 else 0.6 + client / 20,
        "seed": None if client % 3 == 0 else client,
        "top_p": 0.95 if client % 2 else 1,
        "frequency_penalty": 0.5 if client % 4 == 1 else 0,
        "max_tokens": 90,
        "ignore_eos": True,
        "logprobs": TOP,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
    }


def evidence(choice):
    """Ids, logprob bits, top-k ids and bits, finish reason."""
    logprobs = choice["logprobs"]
    top = [
        [(int(name.removeprefix("token_id:")), bits(value)) for name, value in list(one.items())[:TOP]]
        for one in logprobs["top_logprobs"]
    ]
    return choice["token_ids"], [bits(value) for value in logprobs["token_logprobs"]], top, choice["finish_reason"]


def alone(port, client):
    return evidence(ask(port, "/v1/completions", body_of(client)).json["choices"][0])


def together(port):
    """Everyone at once: even clients stream, odd ones wait, some hang up on the way.

    Eight long requests hold the seats until all are in line, and hang up then.
    """
    found, errors = {}, []

    def run(client):
        try:
            found[client] = take(port, client)
        except Exception as error:
            errors.append((client, error))
            raise

    threads = [threading.Thread(target=run, args=(client,)) for client in range(CLIENTS)]
    most = ask(port, "/v1/models").json["data"][0]["max_model_len"]
    plug = {"model": "tiny", "prompt": "x", "temperature": 0, "n": 8, "ignore_eos": True, "max_tokens": most - 1}
    with streaming(port, "/v1/completions", plug) as stream:
        next(stream)
        before = metrics(port)["samebits_requests_admitted_total"]
        for thread in threads:
            thread.start()
        wait_for("all in line", lambda: metrics(port)["samebits_requests_admitted_total"] == before + CLIENTS)
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive()
    assert errors == []
    return {client: one for client, one in found.items() if client not in LEAVING}


def take(port, client):
    if client in LEAVING or client % 2 == 0:
        with streaming(port, "/v1/completions", body_of(client)) as stream:
            chunks = []
            for chunk in stream:
                chunks.append(chunk["choices"][0])
                if len(chunks) == LEAVING.get(client):
                    return None
        return evidence(merged(chunks))
    return alone(port, client)


def merged(chunks):
    """A stream's chunks as one choice."""
    keys = ("token_logprobs", "top_logprobs")
    return {
        "token_ids": joined(chunk["token_ids"] for chunk in chunks),
        "logprobs": {key: joined(chunk["logprobs"][key] for chunk in chunks) for key in keys},
        "finish_reason": chunks[-1]["finish_reason"],
    }


@pytest.mark.parametrize("settings", [{}, {"num_pages": 60, "page_size": 8, "max_num_batched_tokens": 24}])
def test_company_changes_no_bit(settings):
    """The second server's pool is too small for all: it preempts. Its chunks are smaller too."""
    with running(**settings) as server:
        reference = {client: alone(server.port, client) for client in range(CLIENTS)}
        assert metrics(server.port)["samebits_requests_running_max"] == 1
        for _ in range(2):
            found = together(server.port)
            assert set(found) == set(range(CLIENTS)) - set(LEAVING)
            assert {client: one == reference[client] for client, one in found.items()} == dict.fromkeys(found, True)
        seen = metrics(server.port)
        assert seen["samebits_requests_running_max"] == SMALL["max_num_seqs"]
        assert (seen["samebits_preemptions_total"] > 0) == bool(settings)
        wait_for("all pages back", lambda: metrics(server.port)["samebits_kv_pages_held"] == 0)
        assert metrics(server.port)['samebits_requests_total{outcome="abort"}'] > 0


def test_the_same_test_fails_where_order_is_free():
    with running(arithmetic="free") as server:
        reference = {client: alone(server.port, client) for client in range(CLIENTS)}
        found = together(server.port)
        assert any(one != reference[client] for client, one in found.items())


def test_http_gives_what_the_engine_gives_in_process():
    engine = ADAPTER.start("tiny", {**SMALL, "max_num_seqs": 3, "page_size": 16})
    requests = tuple(harness_request(client) for client in range(CLIENTS))
    schedule = Schedule(name="s", arrivals=tuple(Arrival(request=one.id) for one in requests))
    traces = engine.generate(
        Work(requests=requests, schedule=schedule, replay="natural", golden={}, logits_digests=False), lambda *_: None
    )
    with running() as server:
        found = together(server.port)
    for client, one in found.items():
        start = int(traces.requests.length[:client].sum())
        rows = slice(start, start + int(traces.requests.length[client]))
        positions = traces.positions
        assert one[0] == positions.token[rows].tolist()
        assert b"".join(one[1]) == positions.logprob[rows].tobytes()
        assert [[token for token, _ in row] for row in one[2]] == positions.topk_ids[rows].tolist()
        assert b"".join(value for row in one[2] for _, value in row) == positions.topk_logprobs[rows].tobytes()
        assert one[3] == traces.requests.finish_reason[client]


def harness_request(client):
    body = body_of(client)
    sampling = Sampling(
        temperature=body["temperature"], top_p=body["top_p"], top_k=0, min_p=0.0, repetition_penalty=1.0,
        frequency_penalty=body["frequency_penalty"], presence_penalty=0.0, seed=body["seed"], max_tokens=90,
        min_tokens=0, ignore_eos=True, stop=(), stop_token_ids=(), logit_bias=(), logprobs=TOP, n=1,
    )  # fmt: skip
    return Request(id=f"r{client}", prompt_token_ids=tuple(body["prompt"]), text=None, messages=None,
                   sampling=sampling, grammar=None, images=())  # fmt: skip
