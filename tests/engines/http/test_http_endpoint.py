"""An endpoint under the harness: what it lacks, whom it can be compared with, and what never leaves it."""

import asyncio
import dataclasses
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from endpoint_cases import SETTINGS, endpoint, generate, ignore, request, work
from scripted import Model, Reply, page, scripted

from engines.http.adapter import EndpointAdapter
from harness import limits
from harness.choose import choose_plan
from harness.engine import RefusesByConfiguration
from harness.errors import EngineError, Unsupported
from harness.progress import Quiet
from harness.run import RunRequest, run
from harness.schedule import Arrival, Schedule

ROOT = Path(__file__).resolve().parents[3]
KEY = "sk-test-5f1c9d"
CELL = """
schema = 1
name = "{name}"
invariant = "A test."
corpus = "smoke"
rule = "{rule}"
replay = "natural"
minimum = 8

[axis]
name = "{axis}"
reference = "{reference}"
variants = ["{variant}"]

[control]
variant = {{ seed_offset = 1 }}
"""
AXES = {"batch": ("alone", "together"), "replica": ("first", "second"), "restart": ("same", "new")}


def write_cell(folder, rule="topk", axis="batch"):
    """A matrix of one cell on the smoke corpus."""
    reference, variant = AXES[axis]
    cell = CELL.format(name="cell", rule=rule, axis=axis, reference=reference, variant=variant)
    (folder / "cell.toml").write_text(cell)
    (folder / "matrix.toml").write_text('schema = 1\ndescription = "A test."\n')
    return str(folder)


def assignments(url, **settings):
    """Settings as `--set` has them."""
    return [f"{key}={value}" for key, value in {"url": url, "flavour": "vllm", **settings}.items()]


def run_cell(folder, url, rule="topk", axis="batch", **settings):
    """Runs the cell; (exit code, its verdict as recorded)."""
    plan = choose_plan([write_cell(folder, rule, axis)], engine="endpoint", model="tiny", mode=None,
                       assignments=assignments(url, **settings))  # fmt: skip
    request = RunRequest(plan=plan, adapter=EndpointAdapter(), folder=folder / "out", progress=Quiet(), deadline_s=60,
                         overwrite=False, begun=time.monotonic())  # fmt: skip
    record = run(request, lambda record, folder: None)
    return record["exit_code"], record["verdicts"][0]


@pytest.mark.parametrize(
    ("model", "rule", "columns"),
    [
        (Model(), "topk", (True, True)),
        (Model(ids=False), "logprobs", (True, False)),
        (Model(logprobs=False), "tokens", (False, False)),
        (Model(ids=False, logprobs=False), "text", (False, False)),
    ],
)
def test_what_an_endpoint_lacks_lowers_the_strongest_rule(model, rule, columns):
    with scripted(model) as server, endpoint(server.url) as engine:
        assert engine.observed()[limits.RULE] == rule
        positions = generate(engine, request()).positions
        assert (positions.logprob is not None, positions.topk_ids is not None) == columns


def test_a_rule_that_the_evidence_is_too_weak_for_is_unsupported_with_the_reason(tmp_path):
    with scripted(Model(ids=False)) as server:
        code, verdict = run_cell(tmp_path, server.url)
    assert (code, verdict["verdict"]) == (3, "UNSUPPORTED")
    assert "rule 'topk' cannot be judged here, 'logprobs' is the strongest" in verdict["reason"]
    assert "carry no top candidates that can be told apart" in verdict["reason"]


@pytest.mark.parametrize(
    ("seeds", "verdict", "words"),
    [
        ("random", "FAIL", "two draws with the same seed differ"),
        ("fixed", "INSUFFICIENT", "two draws of 16 tokens with different seeds are the same"),
        ("refused", "UNSUPPORTED", "a seed is refused"),
    ],
)
def test_an_endpoint_that_does_not_obey_seeds_is_found_out(tmp_path, seeds, verdict, words):
    with scripted(Model(seeds=seeds)) as server, scripted(Model(seeds=seeds)) as other:
        _, found = run_cell(tmp_path, server.url, rule="tokens", axis="replica", second_url=other.url)
    assert found["verdict"] == verdict, found["reason"]
    assert "sampling layer is unsolved" in found["reason"]
    assert words in found["reason"]
    if verdict == "FAIL":
        assert found["diagnosis"]["layer"] == "sampling"
    if verdict == "INSUFFICIENT":
        assert "the control stayed silent" in found["reason"]


def test_requests_that_never_ran_together_are_insufficient(tmp_path):
    """The server takes one request at a time; every answer is right, and nothing was put to the test."""
    lock = asyncio.Lock()

    def queued(number, call, reply):
        async def release():
            lock.release()

        return Reply(parts=[lock.acquire, *reply.parts[:-1], release, reply.parts[-1]])

    with scripted(Model(spoil=queued)) as server:
        code, verdict = run_cell(tmp_path, server.url)
    assert (code, verdict["verdict"]) == (3, "INSUFFICIENT")
    assert "no PASS without a witness: 0 positions witnessed" in verdict["reason"]
    assert verdict["control"]["fired"]


def test_a_failed_request_is_an_error_verdict(tmp_path):
    busy = Model(spoil=lambda i, call, reply: page({"error": {"message": "busy"}}, 429) if i == 20 else reply)
    with scripted(busy) as server:
        code, verdict = run_cell(tmp_path, server.url)
    assert (code, verdict["verdict"]) == (4, "ERROR")
    assert "HTTP 429: busy; not retried" in verdict["reason"]


@pytest.mark.parametrize(("salt", "verdict"), [("", "PASS"), ("other weights", "FAIL")])
def test_two_endpoints_are_compared_as_replicas(tmp_path, salt, verdict):
    with scripted(Model()) as first, scripted(Model(salt=salt)) as second:
        _, found = run_cell(tmp_path, first.url, axis="replica", second_url=second.url)
        assert first.posts()
        assert second.posts()
    assert found["verdict"] == verdict, found["reason"]
    if verdict == "FAIL":
        assert found["diagnosis"]["layer"] == "environment"


def test_two_addresses_of_one_server_are_no_two_replicas(tmp_path):
    with scripted(Model()) as server:
        _, found = run_cell(tmp_path, server.url, axis="replica", second_url=server.url)
    assert found["verdict"] == "INSUFFICIENT"
    assert "replica did not change between the arms" in found["reason"]


def test_a_key_goes_to_the_server_and_nowhere_else(tmp_path):
    """The server quotes it in pages, headers, answers and errors; no file of the run may hold it."""
    calls = []

    class Talkative(Model):
        def __call__(self, call):
            calls.append(call)
            if call.path == "/version":
                return page({"version": "1", "started_with": f"--api-key {KEY}", "api_key": KEY, "args": [KEY]})
            return super().__call__(call)

    def rejected(number, call, reply):
        return page({"error": {"message": f"Incorrect API key provided: {KEY}"}}, 401) if number == 20 else reply

    with scripted(Talkative(spoil=rejected)) as server:
        options = [word for one in assignments(server.url, api_key_env="ENDPOINT_TEST_KEY") for word in ("--set", one)]
        result = subprocess.run(
            [sys.executable, "-m", "harness.cli", "run", write_cell(tmp_path), "--engine", "endpoint", "--model",
             "tiny", "--out", str(tmp_path / "out"), *options],
            cwd=ROOT, capture_output=True, text=True, env={**os.environ, "ENDPOINT_TEST_KEY": KEY}, check=False,
            timeout=120,
        )  # fmt: skip
    assert result.returncode == 4, result.stderr
    verdict = json.loads((tmp_path / "out" / "run.json").read_text())["verdicts"][0]
    assert "Incorrect API key provided: <key>" in verdict["reason"]
    assert all(call.headers["authorization"] == f"Bearer {KEY}" for call in calls)
    assert KEY not in result.stdout + result.stderr
    files = [file for file in tmp_path.rglob("*") if file.is_file()]
    assert len(files) > 5
    assert [file for file in files if KEY.encode() in file.read_bytes()] == []


def test_a_key_that_is_not_set_is_an_error():
    with (
        pytest.raises(EngineError, match="variable NO_SUCH_KEY_HERE is not set"),
        endpoint("http://127.0.0.1:1", api_key_env="NO_SUCH_KEY_HERE"),
    ):
        pass


def test_answers_of_more_than_one_system_are_told():
    def versions(number, call, reply):
        return Reply(parts=[part.replace(b'{"choices"', b'{"system_fingerprint": "fp_%d", "choices"' % (number % 2))
                            for part in reply.parts])  # fmt: skip

    with scripted(Model(spoil=versions)) as server, endpoint(server.url) as engine:
        assert engine.observed()[limits.MIXED] == "answers carried 2 system fingerprints: fp_0, fp_1"


def test_a_companion_leaves_after_as_many_tokens_as_it_was_to_have():
    leaving = Arrival(request="b", companion=True, cancel_after_tokens=2)
    schedule = Schedule(name="cancelled", arrivals=(leaving, Arrival(request="a")))
    leaving_work = dataclasses.replace(work(request("a"), request("b")), schedule=schedule)
    with scripted(Model()) as server, endpoint(server.url) as engine:
        assert generate(engine, request("a"), request("b"), schedule="together").requests.length.tolist() == [6, 6]
        traces = engine.generate(leaving_work, ignore)
    assert traces.requests.id == ("b", "a")
    assert traces.requests.length.tolist() == [2, 6]
    assert traces.requests.finish_reason == ("abort", "length")


def test_arrivals_follow_what_streams_show():
    """The second request waits for three tokens of the first, which the server holds back until it may go on."""
    order = []

    async def held():
        order.append("fourth token of a")
        while len(server.posts()) < 5:
            await asyncio.sleep(0.001)
        order.append("b was sent")

    def spoil(number, call, reply):
        return Reply(parts=[*reply.parts[:3], held, *reply.parts[3:]]) if number == 3 else reply

    with scripted(Model(spoil=spoil)) as server, endpoint(server.url) as engine:
        generate(engine, request("a"), request("b"), schedule="while-decoding")
    assert order == ["fourth token of a", "b was sent"]


def test_what_an_endpoint_cannot_do_is_refused_before_anything_is_sent():
    adapter = EndpointAdapter()
    assert isinstance(adapter, RefusesByConfiguration)
    attached = {**SETTINGS, "url": "http://127.0.0.1:1"}
    assert "cannot be forced" in adapter.refuses("batch", "golden", attached)
    assert "cannot be restarted" in adapter.refuses("restart", "natural", attached)
    assert "set second_url" in adapter.refuses("replica", "natural", attached)
    assert adapter.refuses("batch", "natural", attached) is None
    assert "needs one, or a program with {port}" in adapter.refuses("batch", "natural", SETTINGS)
    assert "runs as it was started" in adapter.refuses("batch", "natural", {**attached, "server_mode": "free"})
    assert "flavour 'tgi' has" in adapter.refuses(
        "batch", "natural", {**attached, "flavour": "tgi", "api": "completions"}
    )
    with scripted(Model()) as server, endpoint(server.url) as engine:
        with pytest.raises(Unsupported, match="gives no logits"):
            generate(engine, request(), logits_digests=True)
        with pytest.raises(Unsupported, match="'a': text: without a tokenizer"), endpoint(server.url, "text") as plain:
            generate(plain, request())


def test_several_models_must_be_told_apart():
    def answer(call):
        return page({"data": [{"id": "a"}, {"id": "b"}]}) if call.path == "/v1/models" else Model()(call)

    with scripted(answer) as server:
        with pytest.raises(EngineError, match=r"serves 2 models \(a, b\)"), endpoint(server.url):
            pass
        with endpoint(server.url, served_model="b"):
            assert {call.body["model"] for call in server.posts()} == {"b"}
