"""Whatever goes wrong on the way is an error that names the request; nothing is sent twice, followed or believed."""

import asyncio
import json
import re

import pytest
from endpoint_cases import endpoint, generate, request
from scripted import Model, Reply, page, scripted, sse

from engines.http.client import Bounds, Client, check_url
from harness.errors import EngineError

PROBES = 3


def spoiled(change, number=0):
    """A model whose answer to the `number`-th judged request is changed."""
    return Model(spoil=lambda i, call, reply: change(call, reply) if i == PROBES + number else reply)


def edit(**changes):
    """Changes the second event's choice."""

    def change(call, reply):
        events = [json.loads(part[6:]) for part in reply.parts[:-1]]
        choice = events[1]["choices"][0]
        for path, value in changes.items():
            *way, last = path.split("__")
            target = choice
            for key in way:
                target = target[key]
            if value is ...:
                del target[last]
            else:
                target[last] = value
        return Reply(parts=sse(*events))

    return change


def events_of(reply):
    return [json.loads(part[6:]) for part in reply.parts[:-1]]


def twice_the_choice(call, reply):
    events = events_of(reply)
    events[1]["choices"] *= 2
    return Reply(parts=sse(*events))


def wrong_usage(call, reply):
    events = events_of(reply)
    events[-1]["usage"]["completion_tokens"] = 5
    return Reply(parts=sse(*events))


def wrong_prompt(call, reply):
    events = events_of(reply)
    events[-1]["usage"]["prompt_tokens"] = 4
    return Reply(parts=sse(*events))


def ended_twice(call, reply):
    events = events_of(reply)
    events[-1:-1] = [{"choices": [{"index": 0, "text": "", "logprobs": None, "finish_reason": "stop"}]}]
    return Reply(parts=sse(*events))


def late_token(call, reply):
    events = events_of(reply)
    events[-1:-1] = [events[0]]
    return Reply(parts=sse(*events))


def replaced(pattern, text):
    return lambda call, reply: Reply(parts=[re.sub(pattern, text, part) for part in reply.parts])


def moved(location, status=307):
    return lambda call, reply: Reply(status, headers={"location": location})


FAULTS = {
    "429": (lambda c, r: page({"error": {"message": "slow down"}}, 429, retry_after="7"),
            r"HTTP 429, Retry-After 7: slow down; not retried"),
    "500": (lambda c, r: page({"detail": "broken"}, 500), "HTTP 500: broken; not retried"),
    "another host": (moved("http://elsewhere.invalid/v1/completions"),
                     "HTTP 307 redirects to http://elsewhere.invalid; redirects are followed within one scheme, host"),
    "another port": (moved("http://127.0.0.1:9/v1/completions"), "HTTP 307 redirects to http://127.0.0.1:9; "),
    "another scheme": (moved("https://127.0.0.1/v1/completions"), "HTTP 307 redirects to https://127.0.0.1; "),
    "another host without a scheme": (moved("//elsewhere.invalid/x"), "redirects to http://elsewhere.invalid; "),
    "credentials": (lambda c, r: Reply(307, headers={"location": f"http://user:word@{c.headers['host']}/x"}),
                    r"HTTP 307 redirects to http://127.0.0.1:\d+; "),
    "a port that is none": (moved("http://127.0.0.1:port/x"), "Invalid URL in location header"),
    "another method": (moved("/elsewhere", 303), "another path, where a POST would become a GET"),
    "nowhere": (lambda c, r: Reply(307), "HTTP 307 is no answer and names no other place"),
    "not modified": (moved("/elsewhere", 304), "HTTP 304 is no answer and names no other place"),
    "cut between events": (lambda c, r: Reply(parts=r.parts[:3], cut=True), "RemoteProtocolError.*; not retried"),
    "cut inside an event": (lambda c, r: Reply(parts=[*r.parts[:2], r.parts[2][:20]]), "ended inside an event"),
    "no end": (lambda c, r: Reply(parts=r.parts[:-1]), r"ended after 6 tokens without \[DONE\]"),
    "no finish": (lambda c, r: Reply(parts=[*r.parts[:3], r.parts[-1]]),
                  "ended after 3 tokens without a finish reason"),
    "after the end": (lambda c, r: Reply(parts=[*r.parts, r.parts[0]]), r"something came after \[DONE\]"),
    "malformed": (lambda c, r: Reply(parts=sse('{"choices": [')), "malformed JSON"),
    "nan": (lambda c, r: Reply(parts=sse('{"choices": NaN}')), "NaN is no JSON number"),
    "deep": (lambda c, r: Reply(parts=sse("[" * 50000)), "malformed JSON"),
    "a list": (lambda c, r: Reply(parts=sse("[]")), "expected a JSON object, found list"),
    "no choices": (lambda c, r: Reply(parts=sse({"id": 1})), r"\$.choices: expected list, found None"),
    "null logprob": (edit(logprobs__token_logprobs=[None]), "is null, which stands for NaN"),
    "huge logprob": (replaced(rb'(token_logprobs": \[)[^\]]*', rb"\g<1>-1e999"),
                     "is no finite number"),
    "null candidate": (edit(logprobs__top_logprobs=[{"token_id:1": None}]), "is null, which stands for NaN"),
    "no logprobs": (edit(logprobs=None), "logprobs are missing from position 1 on"),
    "no logprobs at all": (replaced(rb'"logprobs": \{.*\}(, "token_ids"|\}\])', rb'"logprobs": null\1'),
                           "evidence is missing: this answer has token ids, no logprobs, others had token ids, logpr"),
    "no ids at all": (replaced(rb'token_id:|, "token_ids": \[\d+\]', b""),
                      "evidence is missing: this answer has tokens by their text, logprobs, others had token ids"),
    "fewer logprobs": (edit(logprobs__token_logprobs=[]), "1 tokens came with 0 logprobs"),
    "other ids": (edit(token_ids=[1, 2]), "2 token ids came with 1 names"),
    "contradicting ids": (edit(token_ids=[511], logprobs__tokens=["token_id:3"]),
                          r"token ids \[511\] came with the names"),
    "text for ids": (replaced(rb'"token_ids": \[\d+\]', b'"token_ids": "x"'),
                     "token_ids: expected list, found 'x'"),
    "duplicate choices": (twice_the_choice, "choice 0 is there twice in one event"),
    "unknown choice": (edit(index=1), "choice 1: 1 were asked for"),
    "wrong count": (wrong_usage, "the server counts 5 tokens and sent 6"),
    "wrong prompt": (wrong_prompt, "the server counts 4 prompt tokens, 3 were sent"),
    "ended twice": (ended_twice, "the choice ended twice"),
    "late token": (late_token, "1 tokens came after the end"),
    "content filter": (edit(finish_reason="content_filter"), "finish reason 'content_filter': expected stop or length"),
    "error event": (lambda c, r: Reply(parts=[*r.parts[:2], *sse({"error": {"message": "out of memory"}})]),
                    "the server reports an error: out of memory"),
    "html": (lambda c, r: Reply(kind="text/html", parts=[b"<html>"]), "expected text/event-stream, found 'text/html'"),
    "compressed": (lambda c, r: Reply(parts=r.parts, headers={"content-encoding": "gzip"}), "'gzip' was not asked for"),
    "too large": (lambda c, r: Reply(parts=[b": " + b"x" * 40000 + b"\n\n"] * 2), "larger than 60000 bytes"),
    "silence": (lambda c, r: Reply(parts=r.parts[:2], silent=True), "no byte for 0.5 s"),
}  # fmt: skip


@pytest.mark.parametrize("fault", sorted(FAULTS))
def test_a_fault_is_an_error_that_names_the_request_and_is_not_retried(fault):
    change, expected = FAULTS[fault]
    settings = {"silence_timeout_s": 0.5, "max_response_bytes": 60000}
    with scripted(spoiled(change)) as server, endpoint(server.url, **settings) as engine:
        with pytest.raises(EngineError, match=expected) as raised:
            generate(engine, request("wanted"))
        assert "request 'wanted'" in str(raised.value)
        assert engine.observed()["requests_failed"] == 1
        assert len(server.posts()) == PROBES + 1
        generate(engine, request("wanted"))  # the same endpoint answers the next work


def test_a_redirect_within_the_server_is_followed_with_body_and_key_a_few_times():
    model, key = Model(), "sk-moved"

    def hops(call):
        """Each completion is sent from /v1/completions through as many other paths as `left` says."""
        if call.path == "/v1/completions":
            return Reply(308, headers={"location": f"/hop/{left}?x=1"})
        if call.path.startswith("/hop/"):
            rest = int(call.path[5:].partition("?")[0])
            call.path = "/v1/completions"
            return model(call) if rest == 1 else Reply(307, headers={"location": f"../hop/{rest - 1}"})
        return model(call)

    left = 3
    with scripted(hops) as server, pytest.MonkeyPatch.context() as patch:
        patch.setenv("MOVED_KEY", key)
        with endpoint(server.url, api_key_env="MOVED_KEY") as engine:
            assert generate(engine, request()).requests.length.tolist() == [6]
            assert engine.observed()["redirects_followed"] == 3
            posts = server.posts()[-4:]
            assert all(call.body == posts[0].body for call in posts)
            assert {call.headers["authorization"] for call in posts} == {f"Bearer {key}"}
            left = 4
            with pytest.raises(EngineError, match="redirected more than 3 times"):
                generate(engine, request())


def test_a_server_of_another_identity_in_the_middle_of_a_run_is_an_error():
    def swapped(number, call, reply):
        reply.headers["x-samebits-fingerprint"] = "a1" if number < PROBES + 1 else "b2"
        return reply

    changed = "'b': the server's identity changed while it was asked: x-samebits-fingerprint was a1, now it is b2"
    with scripted(Model(spoil=swapped)) as server, endpoint(server.url) as engine:
        told = {field.name: field for field in engine.fingerprint()}["server.identity_digest"]
        assert (told.value, told.field_class) == ("a1", "identity")
        with pytest.raises(EngineError, match=changed):
            generate(engine, request("a"), request("b"))
        assert engine.observed()["requests_failed"] == 1


def test_an_identity_that_is_no_longer_told_or_changes_between_probes_is_an_error():
    def silent(number, call, reply):
        return reply if number >= PROBES else Reply(parts=reply.parts, headers={"x-samebits-fingerprint": "a1"})

    def restless(number, call, reply):
        return Reply(parts=reply.parts, headers={"x-samebits-fingerprint": f"a{number}"})

    gone = pytest.raises(EngineError, match="was a1, now it is not sent")
    with scripted(Model(spoil=silent)) as server, endpoint(server.url) as engine, gone:
        generate(engine, request())
    changed = pytest.raises(EngineError, match="was a0, now it is a1")
    with scripted(Model(spoil=restless)) as server, changed, endpoint(server.url):
        pass


def test_without_a_fault_the_same_request_is_answered():
    with scripted(Model()) as server, endpoint(server.url) as engine:
        traces = generate(engine, request("wanted"))
        assert traces.requests.length.tolist() == [6]
        assert engine.observed()["requests_failed"] == 0


def test_a_request_has_a_deadline_of_its_own_however_busy_the_stream():
    async def pause():
        await asyncio.sleep(0.05)

    def endless(call, reply):
        return Reply(parts=[b": still here\n\n", pause] * 200)

    late = pytest.raises(EngineError, match=r"not finished within 0.5 s \(request_timeout_s\)")
    with scripted(spoiled(endless)) as server, endpoint(server.url, request_timeout_s=0.5) as engine, late:
        generate(engine, request())


def test_one_failed_request_gives_up_the_others_and_says_how_many():
    late = spoiled(lambda c, r: page({"error": {"message": "no"}}, 503), number=1)
    with scripted(late) as server, endpoint(server.url) as engine:
        with pytest.raises(
            EngineError, match=r"request 'b' .*HTTP 503.*\(1 other requests finished, 0 were given up\)"
        ):
            generate(engine, request("a"), request("b"), request("c"))
        assert len(server.posts()) == PROBES + 2


def test_an_endpoint_that_is_not_there_is_an_error():
    with scripted(Model()) as server:
        url = server.url
    with pytest.raises(EngineError, match="ConnectError"), endpoint(url):
        pass


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("ftp://host", "expected http"),
        ("host:8000", "expected http"),
        ("http://user:secret-word@host", "expected no user"),
        ("http://host/?key=secret-word", "expected no user"),
    ],
)
def test_a_url_that_could_carry_a_secret_is_refused_without_showing_it(url, message):
    with pytest.raises(EngineError, match=message) as raised:
        check_url(url)
    assert "secret-word" not in str(raised.value)


def test_a_key_is_taken_out_of_what_a_server_says():
    client = Client("http://127.0.0.1:1", "sk-wonderful", _bounds())
    assert client.scrub("Incorrect key sk-wonderful\n given") == "Incorrect key <key> given"


def _bounds():
    return Bounds(silence_s=1, request_s=1, most_bytes=1)


@pytest.mark.parametrize(("flavour", "connection"), [("llamacpp", "close"), ("vllm", "keep-alive")])
def test_a_server_that_hangs_up_after_a_stream_is_asked_over_a_new_connection_each_time(flavour, connection):
    with scripted(Model()) as server, endpoint(server.url, flavour=flavour, api="completions") as engine:
        generate(engine, request(ignore_eos=False))
        assert {call.headers["connection"] for call in server.calls} == {connection}
