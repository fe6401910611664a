"""Servers of ours: started, watched, ended with everything they started; and the shipped matrix on a real one."""

import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from endpoint_cases import SETTINGS, generate, ignore, request, work

from engines.bundled_adapter import BundledAdapter
from engines.http.adapter import EndpointAdapter
from engines.http.managed import build_command, build_environment
from engines.http.options import read_options
from harness.digest import judged_digest
from harness.errors import EngineError, Unsupported
from harness.lifetime import LifetimeProcess
from harness.request import Grammar, Message

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = Path(__file__).with_name("scripted.py")
PROGRAM = f"{{python}} {SCRIPT} {{port}}"
DEADLINE_S = 60
STEADY = "--set threads=1 --set max_num_batched_tokens=64"  # small steps: streams last, and so meet
MANAGED = {**SETTINGS, "flavour": "openai", "program": PROGRAM}


def is_open(port):
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def wait_until_closed(port):
    end = time.monotonic() + DEADLINE_S
    while is_open(port):
        assert time.monotonic() < end, "the server outlived its lifetime"
        time.sleep(0.02)


def test_a_server_is_started_answers_and_is_ended():
    engine = EndpointAdapter().start("tiny", MANAGED)
    try:
        port = engine.server.port
        assert generate(engine, request(ignore_eos=False)).requests.length.tolist() == [6]
        assert engine.observed()["replica"].startswith("started here as ")
    finally:
        engine.stop()
    assert not is_open(port)


def test_a_server_does_not_outlive_a_lifetime_that_is_killed(tmp_path):
    with LifetimeProcess({}, tmp_path / "log") as process:
        process.ask({"do": "start", "engine": "endpoint", "model": "tiny", "settings": MANAGED,
                     "store": str(tmp_path), "session": "s"}, DEADLINE_S)  # fmt: skip
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        command = Path(f"/proc/{children[0]}/cmdline").read_bytes().split(b"\0")
        port = int(command[command.index(str(SCRIPT).encode()) + 1])
        assert is_open(port)
        os.killpg(process.pid, signal.SIGKILL)
    wait_until_closed(port)
    assert "scripted server speaking" in (tmp_path / "log").read_text()  # the server's words are in the lifetime's log


def test_a_server_that_ends_at_once_is_an_error_with_its_status():
    with pytest.raises(EngineError, match="the server ended with status 7"):
        EndpointAdapter().start("tiny", {**MANAGED, "program": f"{PROGRAM} gone"})


def test_a_server_that_never_gets_healthy_is_ended_at_its_deadline():
    with pytest.raises(EngineError, match="not healthy in time"):
        EndpointAdapter().start("tiny", {**MANAGED, "program": f"{PROGRAM} sick", "start_timeout_s": 1.5})


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_server_that_is_gone_is_an_error_and_whoever_ended_its_keeper_ended_it(number):
    engine = EndpointAdapter().start("tiny", MANAGED)
    try:
        engine.server._keeper.send_signal(number)
        engine.server._keeper.wait(DEADLINE_S)
        with pytest.raises(EngineError, match="the server ended with status"):
            generate(engine, request(ignore_eos=False))
    finally:
        engine.stop()
    wait_until_closed(engine.server.port)


def command(flavour, **settings):
    return " ".join(build_command(read_options({"flavour": flavour, **settings}), "/m", 9))


def test_commands_of_known_servers():
    address = "--host 127.0.0.1 --port 9"
    assert command("vllm", arguments="--dtype float32") == f"vllm serve /m {address} --dtype float32"
    assert command("vllm", program="python -m vllm.entrypoints.openai.api_server").endswith(f"--model /m {address}")
    assert command("sglang", server_mode="deterministic").endswith(
        f"-m sglang.launch_server --model-path /m {address} --enable-metrics --enable-deterministic-inference"
    )
    assert command("llamacpp") == f"llama-server --model /m {address} --metrics"
    assert command("tgi") == "text-generation-launcher --model-id /m --hostname 127.0.0.1 --port 9"
    assert command("samebits", server_mode="free").endswith(f"harness.cli serve --model /m {address} --mode free")
    assert command("openai", program="serve {model} on {host}:{port}") == "serve /m on 127.0.0.1:9"
    with pytest.raises(Unsupported, match="'tgi' has no such mode"):
        command("tgi", server_mode="deterministic")


def test_variables_go_to_the_server_and_the_mode_may_add_one():
    options = read_options({"flavour": "vllm", "server_mode": "deterministic", "variables": "A=1 B='2 3'"})
    assert build_environment(options) == {"VLLM_BATCH_INVARIANT": "1", "A": "1", "B": "2 3"}


def test_the_endpoint_matrix_passes_on_samebits_serve(tmp_path):
    """A real server, real sockets, real restarts: alone and beside others, restart, replica, seeds."""
    result = subprocess.run(
        [sys.executable, "-m", "harness.cli", "run", "endpoint", "--engine", "endpoint", "--model", "tiny", "--set",
         "flavour=samebits", "--set", f"arguments={STEADY}", "--out", str(tmp_path / "out"), "--quiet"],
        cwd=ROOT, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert result.returncode in (0, 3), result.stdout + result.stderr
    record = json.loads((tmp_path / "out" / "run.json").read_text())
    verdicts = {one["cell"]: one for one in record["verdicts"]}
    chained = verdicts["while-decoding"]  # on a busy machine each of these may be answered before the next is sent
    assert chained["verdict"] == "PASS" or "no PASS without a witness" in chained["reason"], chained["reason"]
    others = {name: one["verdict"] for name, one in verdicts.items() if one is not chained}
    expected = ("alone-vs-concurrent", "endpoint-decode-vs-prefill", "seeds", "server-replica", "server-restart",
                "server-restart-along-path")  # fmt: skip
    assert others == dict.fromkeys(expected, "PASS"), result.stdout
    assert all(one["control"]["fired"] for one in verdicts.values())
    assert "read from interleaved streams" in verdicts["alone-vs-concurrent"]["caps"][0]
    assert verdicts["server-restart"]["caps"] == []


def test_chat_completions_and_the_engine_itself_give_the_same_bits():
    """One real server, asked through both interfaces, against the bundled engine in this process."""
    adapter, tokenizer = EndpointAdapter(), EndpointAdapter().tokenizer("tiny")
    messages = (Message(role="user", content="hello"),)
    one = request(ids=tokenizer.encode_chat([("user", "hello")]), temperature=0.9, seed=7, logprobs=5, max_tokens=12)
    one = dataclasses.replace(one, messages=messages)
    samples = dataclasses.replace(one, sampling=dataclasses.replace(one.sampling, n=2))
    ending = dataclasses.replace(one.sampling, ignore_eos=False)
    shaped = dataclasses.replace(one, grammar=Grammar(kind="regex", text="[a-e]{8}"), sampling=ending)
    settings = {**SETTINGS, "flavour": "samebits", "arguments": "--set threads=1"}
    server = adapter.start("tiny", settings)
    try:
        url = server.url
        chat = adapter.start("tiny", {**SETTINGS, "flavour": "samebits", "url": url, "api": "chat"})
        found = [generate(server, one), generate(chat, one)]
        pair = generate(server, samples)
        fitting = [generate(server, shaped), generate(chat, shaped)]
        assert server.found.fingerprints == chat.found.fingerprints != frozenset()
        fields = [{field.name: field.value for field in one.fingerprint()} for one in (server, chat)]
        assert fields[0]["server.identity_digest"] == fields[1]["server.identity_digest"]
        assert "server.kernels.digest" in fields[0]
    finally:
        server.stop()
    plain = BundledAdapter()
    own = plain.start("tiny", {setting.name: setting.default for setting in plain.settings()} | {"threads": 1})
    own_free = own.generate(work(one), ignore)
    found.append(own_free)
    assert {judged_digest(traces) for traces in found} == {judged_digest(found[0])}
    assert found[0].positions.topk_ids.shape == (12, 5)
    both = own.generate(work(samples), ignore)
    assert pair.requests.sample.tolist() == [0, 1]
    assert judged_digest(pair) == judged_digest(both)
    alike = own.generate(work(shaped), ignore)
    assert {judged_digest(traces) for traces in fitting} == {judged_digest(alike)} != {judged_digest(own_free)}
    assert alike.requests.masked.tolist() == alike.requests.length.tolist()


def test_an_order_free_server_fails_the_same_cell(tmp_path):
    """The same server in arithmetic `free`: what runs beside a request moves its bits, over HTTP too."""
    result = subprocess.run(
        [sys.executable, "-m", "harness.cli", "run", "endpoint", "--cell", "alone-vs-concurrent", "--engine",
         "endpoint", "--model", "tiny", "--mode", "free", "--set", "flavour=samebits", "--set",
         "arguments=--set threads=1", "--out", str(tmp_path / "out"), "--quiet"],
        cwd=ROOT, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert result.returncode == 1, result.stdout + result.stderr
    verdict = json.loads((tmp_path / "out" / "run.json").read_text())["verdicts"][0]
    assert (verdict["verdict"], verdict["diagnosis"]["layer"]) == ("FAIL", "forward")
