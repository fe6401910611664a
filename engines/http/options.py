"""The options of an endpoint, from settings to typed values. It sends nothing.

Rules: a server is attached to by its URL, or managed: started, restarted and ended by us; a key is named by its
variable and never a setting; what contradicts itself is refused before anything runs.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

from engines.http.client import Bounds
from engines.http.dialect import Dialect
from engines.http.flavours import FLAVOURS, Flavour
from engines.http.scoring import WHOLE, WITHOUT_FIRST, Scorer
from harness.engine import Scalar, Setting
from harness.errors import EngineError

AS_STARTED = "as-started"
SERVER_MODES = (AS_STARTED, "deterministic", "free", "ordinary")
NOT_FORCED = (
    "an endpoint cannot be forced along given tokens; with scoring=prefill it reads them as a prompt, "
    'or use replay = "natural"'
)
TEXT_MODEL = "text"  # no tokenizer is known: prompts are sent as text or messages

SETTINGS = (
    Setting(name="api", default="auto", choices=("auto", "chat", "completions", "generate"),
            meaning="which interface requests go to; auto: the flavour's own first"),
    Setting(name="api_key_env", default="", meaning="the environment variable that holds the key; empty: no key"),
    Setting(name="arguments", default="", meaning="more arguments for a managed server, as in a shell"),
    Setting(name="flavour", default="openai", choices=tuple(sorted(FLAVOURS)), meaning="what kind of server it is"),
    Setting(name="max_response_bytes", default=64 << 20, minimum=1, meaning="bytes one answer may have"),
    Setting(name="program", default="",
            meaning="what starts a managed server, as in a shell; may hold {host}, {port} and {model}"),
    Setting(name="prompts", default="auto", choices=("auto", "ids", "text"),
            meaning="how prompts are sent; auto: as token ids where the interface takes them"),
    Setting(name="replica", default="first", choices=("first", "second"), meaning="which of two servers answers"),
    Setting(name="request_timeout_s", default=600.0, minimum=0.001, meaning="seconds one request may take"),
    Setting(name="scored_prompt", default=WHOLE, choices=(WHOLE, WITHOUT_FIRST),
            meaning="what is sent before a path that is read; without-first is a fault, for controls"),
    Setting(name="scoring", default="decode", choices=("decode", "prefill"),
            meaning="logprobs of tokens as they were generated, or of prompt and path read together as a prompt"),
    Setting(name="second_arguments", default="", meaning="as arguments, for the second server; empty: the same"),
    Setting(name="second_url", default="", meaning="as url, for the second server"),
    Setting(name="served_model", default="", meaning="the model's name at the server; empty: the only one it lists"),
    Setting(name="server_mode", default=AS_STARTED, choices=SERVER_MODES,
            meaning="a managed server's mode; as-started: no flag is added"),
    Setting(name="silence_timeout_s", default=120.0, minimum=0.001, meaning="seconds without a byte of an answer"),
    Setting(name="start_timeout_s", default=600.0, minimum=0.001, meaning="seconds a managed server may take to start"),
    Setting(name="url", default="", meaning="the server to attach to; empty: start one"),
    Setting(name="variables", default="", meaning="variables of a managed server, NAME=VALUE, as in a shell"),
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What the settings come to for the server that answers."""

    flavour: Flavour
    api: str
    url: str  # empty: managed
    replica: str
    served_model: str
    api_key_env: str
    prompts: str  # "auto" | "ids" | "text"
    program: str
    arguments: tuple[str, ...]
    variables: tuple[tuple[str, str], ...]
    server_mode: str
    start_timeout_s: float
    bounds: Bounds
    scored_prompt: str
    scorer: Scorer | None  # None: logprobs as tokens are generated

    @property
    def dialect(self) -> Dialect:
        """The interface."""
        return self.flavour.interfaces[self.api]

    @property
    def managed(self) -> bool:
        """True when the server is ours to start and end."""
        return not self.url


def read_options(configuration: Mapping[str, Scalar]) -> Options:
    """The options of a configuration, defaults where it is silent. Raises EngineError for a contradiction."""
    values = {setting.name: setting.default for setting in SETTINGS} | dict(configuration)
    problem = find_problem(values)
    if problem:
        raise EngineError(problem)

    def text(name: str) -> str:
        return str(values[name])

    flavour = FLAVOURS[text("flavour")]
    second = values["replica"] == "second"
    arguments = text("second_arguments") if second and values["second_arguments"] else text("arguments")
    api = flavour.default_interface if values["api"] == "auto" else text("api")
    return Options(
        flavour=flavour,
        api=api,
        url=text("second_url") if second and values["url"] else text("url"),
        replica=text("replica"),
        served_model=text("served_model"),
        api_key_env=text("api_key_env"),
        prompts=text("prompts"),
        program=text("program"),
        arguments=tuple(shlex.split(arguments)),
        variables=_variables(text("variables")),
        server_mode=text("server_mode"),
        start_timeout_s=float(values["start_timeout_s"]),
        bounds=Bounds(
            silence_s=float(values["silence_timeout_s"]), request_s=float(values["request_timeout_s"]),
            most_bytes=cast("int", values["max_response_bytes"]),
        ),
        scored_prompt=text("scored_prompt"),
        scorer=flavour.scorers[api] if values["scoring"] == "prefill" else None,
    )  # fmt: skip


def find_problem(values: Mapping[str, Scalar]) -> str | None:
    """Why settings cannot be used together, or None."""
    flavour, api = FLAVOURS[str(values["flavour"])], str(values["api"])
    if api != "auto" and api not in flavour.interfaces:
        return f"api: flavour {flavour.name!r} has {', '.join(flavour.interfaces)}, not {api!r}"
    interface = flavour.default_interface if api == "auto" else api
    if values["scoring"] == "prefill" and interface not in flavour.scorers:
        return f"scoring=prefill: {interface} of flavour {flavour.name!r} returns no logprobs of a prompt"
    if values["url"]:
        named = [key for key in ("program", "arguments", "second_arguments", "variables") if values[key]]
        if named:
            return f"{named[0]}: only a managed server is started by us; leave out url or {named[0]}"
        if values["server_mode"] != AS_STARTED:
            return "server_mode: an attached server runs as it was started; leave out url to have one started"
        if values["replica"] == "second" and not values["second_url"]:
            return "replica: the second server needs second_url"
    elif values["second_url"]:
        return "second_url: the first server needs url"
    elif flavour.name == "openai" and "{port}" not in str(values["program"]):
        return "url: flavour 'openai' needs one, or a program with {port} in it that starts a server"
    try:
        _variables(str(values["variables"]))
        shlex.split(f"{values['arguments']} {values['second_arguments']} {values['program']}")
    except ValueError as error:
        return f"arguments, program or variables: {error}"
    return None


def _variables(text: str) -> tuple[tuple[str, str], ...]:
    found = []
    for word in shlex.split(text):
        name, equals, value = word.partition("=")
        if not equals or not name:
            raise ValueError(f"expected NAME=VALUE, found {word!r}")
        found.append((name, value))
    return tuple(found)
