"""A server of ours: its command, its free port, its health, its end. It sends no requests but to its health page.

Rules: one start, never a second try; what the server prints goes to the engine process's log; it has a deadline to
become healthy; a keeper ends it with everything it started, also when this process is killed.
"""

from __future__ import annotations

import os
import secrets
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Mapping

import httpx

from engines.bundled.models import smollm2, tiny
from engines.bundled_adapter import harness_errors
from engines.http.keeper import GRACE_S
from engines.http.options import AS_STARTED, Options
from harness.errors import EngineError, Unsupported

HOST = "127.0.0.1"
_POLL_S = 0.1
_HEALTHY = 200
_PROGRAMS = {
    "vllm": "vllm serve",
    "sglang": "{python} -m sglang.launch_server",
    "llamacpp": "llama-server",
    "tgi": "text-generation-launcher",
    "samebits": "{python} -P -m harness.cli serve",
}


class ManagedServer:
    """A running server. `instance` tells it apart from any other that was ever started."""

    def __init__(self, options: Options, model: str) -> None:
        """Starts it and waits until it is healthy. Raises EngineError, Unsupported."""
        self.port = free_port()
        self.url = f"http://{HOST}:{self.port}"
        self.instance = secrets.token_hex(8)
        self.command = build_command(options, model, self.port)
        environment = {**os.environ, **build_environment(options)}
        keeper = [sys.executable, "-P", "-m", "engines.http.keeper", *self.command]
        self._keeper = subprocess.Popen(  # noqa: S603 - the command the settings name
            keeper, stdin=subprocess.PIPE, stdout=sys.stderr, stderr=sys.stderr, env=environment, start_new_session=True
        )
        begun = time.monotonic()
        try:
            self._wait(options.flavour.health, begun + options.start_timeout_s)
        except BaseException:
            self.stop()
            raise
        self.start_seconds = time.monotonic() - begun

    def check(self) -> None:
        """Raises EngineError once the server has ended."""
        code = self._keeper.poll()
        if code is not None:
            raise EngineError(f"the server ended with status {code}; its last words are in the log")

    def stop(self) -> None:
        """Ends the server and everything it started; waits until it is gone."""
        if self._keeper.stdin is not None:
            self._keeper.stdin.close()
        try:
            self._keeper.wait(2 * GRACE_S)
        except subprocess.TimeoutExpired:
            self._keeper.kill()
            self._keeper.wait()

    def _wait(self, health: str, deadline: float) -> None:
        with httpx.Client(trust_env=False, timeout=5.0) as client:
            while time.monotonic() < deadline:
                self.check()
                try:
                    if client.get(self.url + health).status_code == _HEALTHY:
                        return
                except httpx.HTTPError:
                    pass  # not yet
                time.sleep(_POLL_S)
        raise EngineError(f"the server was not healthy in time (start_timeout_s): {self.url}{health}")


def build_command(options: Options, model: str, port: int) -> tuple[str, ...]:
    """The server's command line. Raises EngineError for a program that is not there, Unsupported for a mode."""
    program = options.program or _PROGRAMS[options.flavour.name]
    model = find_files(options.flavour.name, model)
    words = [
        word.replace("{python}", sys.executable)
        .replace("{host}", HOST)
        .replace("{port}", str(port))
        .replace("{model}", model)
        for word in shlex.split(program)
    ]
    template = "{port}" in program
    return (*words, *(() if template else _arguments(options, words, model, port)), *_mode(options), *options.arguments)


def find_files(flavour: str, model: str) -> str:
    """What a server is given for a model that is known here by name: its folder or file. Raises EngineError."""
    if flavour in ("openai", "samebits") or model not in (smollm2.NAME, tiny.NAME, tiny.MOE_NAME):
        return model
    if model != smollm2.NAME:
        raise EngineError(f"model {model!r} is made in memory and has no files; another server needs a folder or file")
    with harness_errors():
        return str(smollm2.gguf_path() if flavour == "llamacpp" else smollm2.open_smollm2().folder)


def build_environment(options: Options) -> Mapping[str, str]:
    """Variables that the server gets beside ours; those of a mode, then those that the settings name."""
    found = (
        {"VLLM_BATCH_INVARIANT": "1"}
        if options.flavour.name == "vllm" and options.server_mode == "deterministic"
        else {}
    )
    return {**found, **dict(options.variables)}


def free_port() -> int:
    """A port that is free now. Another process may take it first; then the server says so and ends."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def _arguments(options: Options, words: list[str], model: str, port: int) -> list[str]:
    address = ["--host", HOST, "--port", str(port)]
    name = options.flavour.name
    if name == "vllm":
        return [*([model] if words[-1] == "serve" else ["--model", model]), *address]
    if name == "sglang":
        return ["--model-path", model, *address, "--enable-metrics"]
    if name == "llamacpp":
        return ["--model", model, *address, "--metrics"]
    if name == "tgi":
        return ["--model-id", model, "--hostname", HOST, "--port", str(port)]
    return ["--model", model, *address]


def _mode(options: Options) -> tuple[str, ...]:
    if options.server_mode == AS_STARTED:
        return ()
    modes = options.flavour.modes
    if options.server_mode not in modes:
        raise Unsupported(f"server_mode {options.server_mode!r}: flavour {options.flavour.name!r} has no such mode")
    return modes[options.server_mode]
