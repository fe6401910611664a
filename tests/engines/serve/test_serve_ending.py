"""What ends early: clients that hang up, engines that fail, servers that are told to stop."""

import dataclasses
import http.client
import json
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from serving import DEADLINE_S, ROOT, ask, complete, connect, metrics, process, running, streaming, wait_for

from engines.bundled_lifetime import BundledLifetime
from engines.serve.server import listen
from harness.errors import UsageError

LONG = {"model": "tiny", "prompt": "a long one", "temperature": 0, "max_tokens": 8000, "ignore_eos": True}


def held(port):
    return metrics(port)["samebits_kv_pages_held"]


def raw_request(body):
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(data)}"
    return head.encode() + b"\r\n\r\n" + data


@pytest.fixture(scope="module")
def port():
    with running() as server:
        yield server.port


# Clients that hang up


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("reset", [False, True], ids=["closed", "reset"])
def test_a_client_that_hangs_up_gives_its_pages_back(port, stream, reset):
    before = metrics(port)
    client = connect(port)
    client.sendall(raw_request({**LONG, "stream": stream, "n": 3}))
    if stream:
        assert client.recv(100).startswith(b"HTTP/1.1 200")
    wait_for("three running", lambda: metrics(port)["samebits_requests_running"] == 3)
    assert held(port) > 0
    if reset:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
    client.close()
    wait_for("all pages back", lambda: held(port) == 0)
    after = metrics(port)
    aborted = 'samebits_requests_total{outcome="abort"}'
    assert after[aborted] - before[aborted] == 3
    assert after["samebits_requests_running"] == after["samebits_requests_waiting"] == 0
    generated = after["samebits_generation_tokens_total"] - before["samebits_generation_tokens_total"]
    assert generated < 3 * 8000, "it ran to its end instead"


def test_one_that_waits_in_line_can_hang_up_too(port):
    with streaming(port, "/v1/completions", {**LONG, "n": 8}) as stream:
        next(stream)
        client = connect(port)
        client.sendall(raw_request(LONG))
        wait_for("one in line", lambda: metrics(port)["samebits_requests_waiting"] == 1)
        client.close()
        wait_for("nobody in line", lambda: metrics(port)["samebits_requests_waiting"] == 0)
        assert metrics(port)["samebits_requests_running"] == 8
    wait_for("all pages back", lambda: held(port) == 0)


def test_the_event_loop_answers_while_the_engine_is_full(port):
    with streaming(port, "/v1/completions", {**LONG, "n": 8}) as stream:
        next(stream)
        assert ask(port, "/health").json == {"status": "ok"}
        assert ask(port, "/samebits/fingerprint").status == 200
        assert ask(port, "/v1/completions", {**LONG, "top_p": 2}).status == 400
        assert metrics(port)["samebits_requests_running"] == 8
    wait_for("all pages back", lambda: held(port) == 0)


# Engines that fail


class Spoiled:
    """An arithmetic that returns NaN, or raises, where a prompt begins with a certain token."""

    def __init__(self, inner, error=None):
        self.inner, self.error, self.bad_page = inner, error, None
        self.name = inner.name

    def forward(self, batch):
        logits = self.inner.forward(batch)
        bad = {int(row) for row, token in zip(batch.sequence, batch.token, strict=True) if token == 300}
        for index, wanted in enumerate(batch.wanted):
            if int(batch.sequence[wanted]) in bad:
                if self.error is not None:
                    raise self.error
                logits[index, 5] = np.nan
        return logits

    def __getattr__(self, name):
        return getattr(self.inner, name)


@pytest.fixture
def spoiled(monkeypatch):
    def start(error=None):
        from engines import bundled_lifetime

        original = bundled_lifetime.open_arithmetic
        monkeypatch.setattr(bundled_lifetime, "open_arithmetic", lambda *a: Spoiled(original(*a), error))

    return start


def test_a_request_whose_logits_are_no_numbers_harms_no_other(port, spoiled):
    healthy = {"max_tokens": 60, "ignore_eos": True, "logprobs": 3, "temperature": 1.0, "seed": 3}
    expected = complete(port, "healthy", **healthy)["choices"]
    spoiled()
    with running() as server:
        found, threads = [], []
        for _ in range(3):
            threads.append(threading.Thread(target=lambda: found.append(complete(server.port, "healthy", **healthy))))
            threads[-1].start()
        for _ in range(4):
            answer = ask(server.port, "/v1/completions", {"model": "tiny", "prompt": [300, 1], "temperature": 0})
            assert (answer.status, answer.error["code"]) == (500, "engine_error")
            assert "generated position 0: logit of token 5 is nan" in answer.error["message"]
        with streaming(server.port, "/v1/completions", {**LONG, "prompt": [300, 1]}) as stream:
            (only,) = stream
            assert only["error"]["code"] == "engine_error"
        for thread in threads:
            thread.join(DEADLINE_S)
        assert [one["choices"] for one in found] == [expected] * 3
        assert complete(server.port, "healthy", **healthy)["choices"] == expected
        assert held(server.port) == 0


def test_an_engine_that_breaks_fails_everyone_and_says_so(spoiled):
    spoiled(RuntimeError("out of order"))
    with running() as server:
        with streaming(server.port, "/v1/completions", LONG) as stream:
            next(stream)
            answer = ask(server.port, "/v1/completions", {"model": "tiny", "prompt": [300], "temperature": 0})
            assert answer.status == 500
            assert "RuntimeError: out of order" in answer.error["message"]
            *_, last = stream
            assert "out of order" in last["error"]["message"]
        assert (ask(server.port, "/health").status, ask(server.port, "/health").error["code"]) == (503, "engine_error")
        assert ask(server.port, "/v1/completions", LONG).status == 503
        assert held(server.port) == 0


# Servers that are told to stop


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_what_runs_finishes_within_the_grace(number):
    with process() as (child, port):
        body = {**LONG, "max_tokens": 600}
        with streaming(port, "/v1/completions", body) as stream:
            chunks = [next(stream)]
            child.send_signal(number)
            chunks += list(stream)
        assert len(chunks) == 600
        assert chunks[-1]["choices"][0]["finish_reason"] == "length"
        assert child.wait(DEADLINE_S) == 0
        told = child.stderr.read()
        assert f"{number.name}: 1 under way, 30 s to finish" in told
        assert "1 sequences taken in, 0 of them cut short" in told
        with pytest.raises(ConnectionRefusedError):
            connect(port)


def test_what_does_not_finish_in_time_is_told():
    with process("--grace", "0.2") as (child, port):
        whole = {}
        waiting = threading.Thread(target=lambda: whole.update(answer=ask(port, "/v1/completions", {**LONG, "n": 8})))
        waiting.start()
        wait_for("eight running", lambda: metrics(port)["samebits_requests_running"] == 8)
        with streaming(port, "/v1/completions", {**LONG, "n": 9}) as stream:  # 17 sequences, 16 seats: one waits
            next(stream)
            child.send_signal(signal.SIGTERM)
            *_, last = stream
        waiting.join(DEADLINE_S)
        assert last["error"]["code"] == "shutting_down"
        assert whole["answer"].status == 503
        assert "did not finish this request: 0.2 s of grace are over" in whole["answer"].error["message"]
        assert child.wait(DEADLINE_S) == 0
        assert "17 sequences taken in, 17 of them cut short" in child.stderr.read()


def test_clients_that_stall_do_not_keep_it():
    with process("--grace", "0") as (child, port):
        half = connect(port)
        half.sendall(raw_request(LONG)[:-9])
        deaf = socket.socket()
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        deaf.connect(("127.0.0.1", port))
        deaf.sendall(raw_request({**LONG, "stream": True, "logprobs": 20}))
        wait_for("one running", lambda: metrics(port)["samebits_requests_running"] == 1)
        child.send_signal(signal.SIGTERM)
        assert child.wait(DEADLINE_S) == 0
        half.close()
        deaf.close()
        assert "Traceback" not in (told := child.stderr.read()), told
        assert "1 sequences taken in, 1 of them cut short" in told


def test_a_second_signal_ends_it_at_once():
    with process() as (child, port), streaming(port, "/v1/completions", {**LONG, "n": 16}) as stream:
        next(stream)
        child.send_signal(signal.SIGINT)
        next(stream)
        wait_for_line(child, "SIGINT: 16 under way")
        child.send_signal(signal.SIGTERM)
        *_, last = stream
        assert "a second SIGTERM" in last["error"]["message"]
        assert child.wait(DEADLINE_S) == 0


def wait_for_line(child, text):
    assert text in child.stderr.readline()


def test_an_idle_server_stops_too_and_connections_that_idle_do_not_keep_it():
    with process() as (child, port):
        idle = http.client.HTTPConnection("127.0.0.1", port, timeout=DEADLINE_S)
        idle.request("GET", "/health")
        assert idle.getresponse().read() == b'{"status":"ok"}'
        child.send_signal(signal.SIGTERM)
        assert child.wait(DEADLINE_S) == 0
        idle.close()


def test_new_orders_are_refused_while_it_drains():
    with running() as server:
        with streaming(server.port, "/v1/completions", {**LONG, "n": 2}) as stream:
            next(stream)
            server.service.draining = True
            refused = ask(server.port, "/v1/completions", LONG)
            assert (refused.status, refused.error["code"]) == (503, "shutting_down")
            assert ask(server.port, "/health").json == {"status": "draining"}
            assert next(stream)["choices"]
        server.service.draining = False


# Starting


def serve(*arguments):
    command = [sys.executable, "-m", "harness.cli", "serve", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=DEADLINE_S, check=False)


def test_a_port_in_use_is_one_clear_error():
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        result = serve("--model", "tiny", "--port", str(port))
    assert result.returncode == 2
    assert result.stderr == (
        f"samebits: --host 127.0.0.1 --port {port}: cannot listen there (Address already in use); "
        "choose another, port 0 for any\n"
    )
    with pytest.raises(UsageError, match="cannot listen there"):
        listen("256.1.2.3", 0)


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--model", "none-such"], 2, "model 'none-such': expected"),
        (["--model", "tiny", "--set", "pages=3"], 2, "no setting 'pages'"),
        (["--model", "tiny", "--mode", "fast"], 2, "has no mode 'fast'"),
        (["--model", "tiny", "--engine", "fake"], 2, "only the bundled engine is served"),
        (["--model", "tiny", "--port", "70000"], 2, "0<=x<=65535"),
        (["--model", "tiny", "--set", "isa=generic", "--set", "compiler=clang++-none"], 2, "not offered"),
    ],
)
def test_what_cannot_be_served_is_said(arguments, code, words):
    result = serve("--port", "0", *arguments)
    assert (result.returncode, words in result.stderr) == (code, True), result.stderr
    assert "Traceback" not in result.stderr


def test_the_process_carries_the_engines_variables_before_anything_is_imported():
    with process("--mode", "ordinary", "--set", "threads=1") as (child, port):
        variables = Path(f"/proc/{child.pid}/environ").read_text().split("\0")
        assert {"OMP_NUM_THREADS=1", "OMP_WAIT_POLICY=PASSIVE", "PYTHONHASHSEED=0"} <= set(variables)
        fields = {one["name"]: one["value"] for one in ask(port, "/samebits/fingerprint").json["fields"]}
        assert (fields["env.OMP_NUM_THREADS"], fields["arithmetic.name"]) == ("1", "free")


def test_lifetimes_have_what_the_server_reads():
    """The server reaches into the lifetime; a renamed field should fail here, by name."""
    names = {field.name for field in dataclasses.fields(BundledLifetime)}
    assert {"engine", "model_name", "tokenizer", "arithmetic"} <= names
