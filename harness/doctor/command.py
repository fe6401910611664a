"""From the words of one command to what it starts: wrappers peeled off, options read, lost variables named.

It knows command lines, not shells: the caller brings the words (None where the text cannot tell) and the environment at
that point. Nothing is run.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from harness.doctor.engines import (
    SERVER_MODULES,
    image_engine,
    image_version,
    is_server_image,
    name_hardware,
)
from harness.doctor.facts import Blocked, EnvSet, Image, Install, Option, Start
from harness.doctor.finding import Place
from harness.doctor.options import read_options
from harness.doctor.process import UNKNOWN, Process, known_text
from harness.doctor.tools import read_curl, read_installs
from harness.doctor.wrappers import peel_wrapper

MAX_WORDS = 4_000  # of one command; nobody types more


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What one command amounts to."""

    starts: tuple[Start, ...] = ()
    images: tuple[Image, ...] = ()
    installs: tuple[Install, ...] = ()
    script: str = ""  # the text of `sh -c TEXT`, still to be read
    body: tuple[str, tuple[str, ...]] | None = None  # a request sent by curl: (url, payloads)
    environment: tuple[EnvSet, ...] = ()  # what reaches the process, for `script`
    blocked: tuple[Blocked, ...] = ()


def read_command(
    words: Sequence[str],
    place: Place,
    settings: Mapping[str, EnvSet],
    *,
    slurm_export: str = "",
    scope: str = "",
) -> Outcome:
    """What a command starts, given the environment before it. `slurm_export` is the job's own `--export`."""
    process = Process(words=list(words[:MAX_WORDS]), place=place, settings=dict(settings))
    for _ in range(32):
        if not process.words or not peel_wrapper(process, slurm_export):
            break
    return _conclude(process, scope)


def _conclude(process: Process, scope: str) -> Outcome:
    base = Outcome(
        images=tuple(process.images),
        environment=tuple(process.settings.values()),
        blocked=tuple(process.blocked),
    )
    words = process.words
    name = words[0].rsplit("/", 1)[-1] if words else ""
    if name in ("bash", "sh", "dash", "zsh"):
        return _conclude_shell(process, base, scope)
    if name == "curl":
        return replace(base, body=read_curl(words))
    installs = read_installs(words, process.place)
    if installs:
        return replace(base, installs=installs)
    start = find_start(words, process.place, image=process.image)
    if start is None:
        return base
    return replace(base, starts=(_finish(process, start, scope),))


def _finish(process: Process, start: Start, scope: str) -> Start:
    hardware = start.hardware or process.hardware or name_hardware(process.image)
    return replace(
        start,
        settings=tuple(process.settings.values()),
        blocked=tuple(process.blocked),
        reach="container" if process.contained else "",
        open=process.open,
        image=process.image,
        version=start.version or image_version(process.image),
        hardware=hardware,
        env_files=tuple(process.env_files),
        scope=scope,
    )


def _conclude_shell(process: Process, base: Outcome, scope: str) -> Outcome:
    words = process.words[1:]
    while words and re.fullmatch(r"[-+][a-z]*", words[0]) and "c" not in words[0]:
        del words[0]
    if len(words) >= 2 and re.fullmatch(r"-[a-z]*c[a-z]*", words[0]):
        return replace(base, script=words[1])
    if words and UNKNOWN not in words[0]:
        start = Start(engine="", place=process.place, target=words[0])
        return replace(base, starts=(_finish(process, start, scope),))
    return base


def find_start(words: Sequence[str], place: Place, *, image: str = "") -> Start | None:
    """The engine (or the file) that these words start, wrappers already gone; None for anything else."""
    engine_of_image = image_engine(image) if image else ""
    if is_server_image(image) and (not words or words[0].startswith("-") or not _is_program(words[0])):
        return _server("vllm", words, place)
    if not words:
        return None
    name = words[0].rsplit("/", 1)[-1]
    if name == "vllm":
        return _server("vllm", words[2:], place) if words[1:2] in (["serve"], ["run-batch"]) else None
    if name == "sglang":
        return _server("sglang", words[2:], place) if words[1:2] == ["serve"] else None
    if name == "trtllm-llmapi-launch":
        return find_start(words[1:], place, image=image)
    if name == "trtllm-serve":
        return _server("tensorrt_llm", words[2:] if words[1:2] == ["serve"] else words[1:], place)
    if re.fullmatch(r"python[\d.]*|torchrun|accelerate|deepspeed|pypy3?", name):
        return _find_python_start(words, place)
    if re.fullmatch(r"source|\.", name):
        return _find_script(words[1:], place)
    if name.endswith((".py", ".sh")) and UNKNOWN not in words[0]:
        return Start(engine="", place=place, target=words[0])
    if engine_of_image == "vllm" and words[0].startswith("--"):
        return _server("vllm", words, place)
    return None


def _is_program(word: str) -> bool:
    name = word.rsplit("/", 1)[-1]
    return bool(re.fullmatch(r"vllm|sglang|python[\d.]*|trtllm-serve|env|exec|.*\.(py|sh)", name))


def _find_python_start(words: Sequence[str], place: Place) -> Start | None:
    rest = list(words[1:])
    while rest:
        word = rest.pop(0)
        if word == "-m" and rest:
            module = rest.pop(0)
            if module in SERVER_MODULES:
                return _server(SERVER_MODULES[module], rest, place)
            if UNKNOWN in module or module in ("torch.distributed.run", "torch.distributed.launch"):
                continue
            return Start(engine="", place=place, target=module.replace(".", "/") + ".py")
        if word == "-c":
            return None
        if word.endswith(".py") and UNKNOWN not in word:
            return Start(engine="", place=place, target=word)
        if not word.startswith("-") and "=" not in word and not word.isdecimal() and word != "launch":
            return None
    return None


def _find_script(words: Sequence[str], place: Place) -> Start | None:
    for word in words:
        if not word.startswith("-") and UNKNOWN not in word:
            return Start(engine="", place=place, target=word)
    return None


def _server(engine: str, words: Sequence[str], place: Place) -> Start:
    options, loose = read_options(words, place)
    if loose and "model" not in options:
        options["model"] = Option(value=known_text(loose[0]), place=place)
    unknown = any(word == UNKNOWN for word in loose)
    device = options.get("device")
    hardware = name_hardware(device.value) if device and device.value else ""
    return Start(
        engine=engine,
        place=place,
        options=options,
        options_open=unknown,
        server=True,
        hardware=hardware,
    )
