"""From the words of one command to what it starts: wrappers peeled off, options read, lost variables named.

It knows command lines, not shells: the caller brings the words (None where the text cannot tell) and the environment at
that point. Nothing is run.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from harness.doctor.engines import (
    SERVER_MODULES,
    image_engine,
    image_version,
    is_server_image,
    name_hardware,
)
from harness.doctor.facts import Blocked, EnvSet, Image, Install, Option, Start
from harness.doctor.finding import Place

UNKNOWN = "\0"  # stands inside a word for a part that the text does not tell

_DOCKER_VALUED = frozenset(
    [
        "-p",
        "--publish",
        "-v",
        "--volume",
        "--name",
        "--gpus",
        "--network",
        "--net",
        "--ipc",
        "--shm-size",
        "--runtime",
        "-w",
        "--workdir",
        "-u",
        "--user",
        "-h",
        "--hostname",
        "--mount",
        "--device",
        "--memory",
        "-m",
        "--cpus",
        "--ulimit",
        "--restart",
        "--label",
        "-l",
        "--add-host",
        "--entrypoint",
        "--platform",
        "--pull",
        "--log-driver",
        "--log-opt",
        "--cap-add",
        "--cap-drop",
        "--security-opt",
        "--tmpfs",
        "--group-add",
        "--pid",
        "--expose",
        "--link",
        "--cpuset-cpus",
        "--health-cmd",
        "--stop-timeout",
        "--userns",
        "--index",
        "--cidfile",
        "--dns",
        "-e",
        "--env",
        "--env-file",
        "--annotation",
    ]
)
_SRUN_VALUED = frozenset(
    [
        "-n",
        "--ntasks",
        "-N",
        "--nodes",
        "-p",
        "--partition",
        "-c",
        "--cpus-per-task",
        "-t",
        "--time",
        "-A",
        "--account",
        "-G",
        "--gpus",
        "-J",
        "--job-name",
        "-w",
        "--nodelist",
        "-o",
        "--output",
        "-e",
        "--error",
        "--mem",
        "--gres",
        "--export",
        "-D",
        "--chdir",
        "-x",
        "--exclude",
        "--ntasks-per-node",
        "--gpus-per-node",
        "--gpus-per-task",
        "--cpu-bind",
        "--mpi",
        "--container-image",
        "--container-mounts",
        "--container-env",
        "-C",
        "--constraint",
        "--jobid",
        "--het-group",
        "--distribution",
        "--container-workdir",
        "--container-name",
        "--qos",
        "-q",
    ]
)
_SUDO_VALUED = frozenset(
    ["-u", "--user", "-g", "--group", "-h", "--host", "-p", "--prompt", "-C", "-r", "-t", "-T", "-D", "--chdir"]
)
_MPI_VALUED = frozenset(
    """-np -n -N --np -c -x -H --host --hostfile -hostfile -machinefile --mca -mca -bind-to --bind-to -map-by --map-by
    -ppn -genv -env -f -hosts -host""".split()  # noqa: SIM905 - a list of options reads best as a command line
)
_PLAIN_WRAPPERS = frozenset({"exec", "nohup", "time", "command", "setsid", "ionice", "chrt", "builtin", "then", "do"})
_VALUED_WRAPPERS: Mapping[str, frozenset[str]] = {
    "numactl": frozenset({"-N", "-m", "-C", "-i", "-p"}),
    "nice": frozenset({"-n"}),
    "stdbuf": frozenset({"-i", "-o", "-e"}),
    "nsys": frozenset({"-o", "-t"}),
    "uv": frozenset({"--with", "--python", "-p", "--extra", "--project", "--env-file"}),
    "conda": frozenset({"-n", "--name", "-p", "--prefix"}),
}


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


@dataclass(slots=True, kw_only=True)
class _Process:
    """The process under construction while wrappers are peeled."""

    words: list[str]
    place: Place
    settings: dict[str, EnvSet]
    blocked: list[Blocked] = field(default_factory=list)
    image: str = ""
    images: list[Image] = field(default_factory=list)
    env_files: list[str] = field(default_factory=list)
    hardware: str = ""
    contained: bool = False
    open: str = ""
    entrypoint: str = ""

    def keep_only(self, names: set[str], reason: str) -> None:
        """Drops every setting but `names`; each dropped one is remembered with the reason."""
        for name in [name for name in self.settings if name not in names]:
            setting = self.settings.pop(name)
            if not setting.unset:
                self.blocked.append(Blocked(setting=setting, place=self.place, reason=reason))

    def set_value(self, name: str, value: str | None) -> None:
        self.settings[name] = EnvSet(name=name, value=value, place=self.place)
        self.blocked = [lost for lost in self.blocked if lost.setting.name != name]


def read_command(
    words: Sequence[str],
    place: Place,
    settings: Mapping[str, EnvSet],
    *,
    slurm_export: str = "",
    scope: str = "",
) -> Outcome:
    """What a command starts, given the environment before it. `slurm_export` is the job's own `--export`."""
    process = _Process(words=list(words), place=place, settings=dict(settings))
    for _ in range(32):
        if not process.words or not _peel(process, slurm_export):
            break
    return _conclude(process, scope)


def _peel(process: _Process, slurm_export: str) -> bool:
    """Takes one wrapper off; False when the word in front is the program itself."""
    word = process.words[0]
    assigned = re.fullmatch(r"([A-Za-z_]\w*)=(.*)", word, re.DOTALL)
    if assigned:
        process.set_value(assigned[1], _known(assigned[2]))
        del process.words[0]
        return True
    name = word.rsplit("/", 1)[-1]
    if name in _PLAIN_WRAPPERS:
        del process.words[0]
        _drop_options(process.words, frozenset())
        return True
    if name in _VALUED_WRAPPERS:
        return _peel_valued(process, name)
    peel = _PEELERS.get(name)
    return peel(process, slurm_export) if peel else False


def _known(value: str) -> str | None:
    return None if UNKNOWN in value else value


def _peel_valued(process: _Process, name: str) -> bool:
    rest = process.words[1:]
    if name in ("uv", "conda", "poetry"):
        if rest[:1] != ["run"]:
            return False
        rest = rest[1:]
    if name == "nsys" and rest[:1] == ["profile"]:
        rest = rest[1:]
    process.words = rest
    _drop_options(process.words, _VALUED_WRAPPERS[name])
    return True


def _drop_options(words: list[str], valued: frozenset[str]) -> list[tuple[str, str]]:
    """Removes the options in front of `words` and returns them as (name, value)."""
    taken: list[tuple[str, str]] = []
    while words and words[0].startswith("-") and words[0] != "-":
        word = words.pop(0)
        if word == "--":
            break
        name, equals, value = word.partition("=")
        if not equals and name in valued and words:
            value = words.pop(0)
        elif not equals and len(name) > 2 and name[1] != "-" and name[:2] in valued:
            name, value = name[:2], name[2:]
        taken.append((name, value))
    return taken


def _peel_timeout(process: _Process, _: str) -> bool:
    del process.words[0]
    _drop_options(process.words, frozenset({"-s", "--signal", "-k", "--kill-after"}))
    del process.words[:1]
    return True


def _peel_taskset(process: _Process, _: str) -> bool:
    del process.words[0]
    _drop_options(process.words, frozenset())
    del process.words[:1]
    return True


def _peel_env(process: _Process, _: str) -> bool:
    del process.words[0]
    for name, value in _drop_options(process.words, frozenset({"-u", "--unset", "-C", "--chdir"})):
        if name in ("-i", "--ignore-environment"):
            process.keep_only(set(), "`env -i` starts the command with an empty environment")
        if name in ("-u", "--unset"):
            process.settings.pop(value, None)
    return True


def _peel_sudo(process: _Process, _: str) -> bool:
    del process.words[0]
    kept: set[str] = set()
    for name, value in _drop_options(process.words, _SUDO_VALUED):
        if name in ("-E", "--preserve-env") and not value:
            return True
        if name == "--preserve-env":
            kept |= set(value.split(","))
        elif re.fullmatch(r"-[A-Za-z]*E[A-Za-z]*", name):
            return True
    process.keep_only(kept, "`sudo` starts the command with a fresh environment")
    return True


def _peel_srun(process: _Process, slurm_export: str) -> bool:
    del process.words[0]
    export = slurm_export
    for name, value in _drop_options(process.words, _SRUN_VALUED):
        if name == "--export":
            export = value
        if name in ("--gres", "-C", "--constraint", "--gpus", "-G"):
            process.hardware = process.hardware or name_hardware(value)
    apply_slurm_export(process.settings, process.blocked, process.place, export)
    return True


def apply_slurm_export(settings: dict[str, EnvSet], blocked: list[Blocked], place: Place, export: str) -> None:
    """What `--export=` of srun or sbatch lets through: ALL, NONE, or names and NAME=VALUE pairs."""
    if not export or UNKNOWN in export:
        return
    parts = [part for part in export.split(",") if part]
    kept = {part for part in parts if "=" not in part}
    if not any(part.upper() == "ALL" for part in parts):
        for name in [name for name in settings if name not in kept]:
            lost = settings.pop(name)
            if not lost.unset:
                reason = f"`--export={export}` does not let it through to the step"
                blocked.append(Blocked(setting=lost, place=place, reason=reason))
    for part in parts:
        name, equals, value = part.partition("=")
        if equals:
            settings[name] = EnvSet(name=name, value=value, place=place)


def _peel_mpi(process: _Process, _: str) -> bool:
    del process.words[0]
    words = process.words
    passed: set[str] = set()
    remote = False
    while words and words[0].startswith("-"):
        word = words.pop(0)
        if word in ("-genvall", "--genvall"):
            remote = False
        elif word in ("-genv", "-env") and len(words) >= 2:
            process.set_value(words.pop(0), _known(words.pop(0)))
        elif word == "-x" and words:
            name, equals, value = words.pop(0).partition("=")
            passed.add(name)
            if equals:
                process.set_value(name, _known(value))
        elif word in ("--mca", "-mca"):
            del words[:2]
        elif word in _MPI_VALUED and words:
            words.pop(0)
            remote = remote or word in ("-H", "--host", "-host", "--hostfile", "-hostfile", "-machinefile")
    if remote:
        passed |= {name for name, setting in process.settings.items() if setting.place == process.place}
        process.keep_only(passed, "`mpirun` does not send it to other hosts without `-x`")
    return True


def _peel_ssh(process: _Process, _: str) -> bool:
    del process.words[0]
    _drop_options(process.words, frozenset({"-p", "-i", "-o", "-l", "-J", "-F"}))
    del process.words[:1]
    process.keep_only(set(), "`ssh` does not carry the local environment to the other host")
    if len(process.words) == 1:
        process.words = ["bash", "-c", process.words[0]]
    return True


def _peel_docker(process: _Process, _: str) -> bool:
    words = process.words
    if words[1:2] == ["compose"] or len(words) < 2 or words[1] not in ("run", "exec", "create"):
        return False
    action = words[1]
    del words[:2]
    passed: set[str] = set()
    for name, value in _drop_options(words, _DOCKER_VALUED):
        if name in ("-e", "--env"):
            variable, equals, text = value.partition("=")
            passed.add(variable)
            if equals:
                process.set_value(variable, _known(text))
        elif name == "--env-file":
            process.env_files.append(value)
        elif name == "--gpus":
            process.hardware = process.hardware or name_hardware(value)
        elif name == "--entrypoint":
            process.entrypoint = value
    process.keep_only(passed, f"`docker {action}` passes no variable without `-e` or `--env-file`")
    if any(UNKNOWN in name for name in process.env_files):
        process.open = "an --env-file whose name is computed"
    process.contained = True
    process.image = words.pop(0) if words else ""
    if action == "exec":
        process.image = ""
        process.open = process.open or "the running container's own environment"
    elif process.image and UNKNOWN not in process.image:
        engine = image_engine(process.image)
        process.images.append(Image(ref=process.image, engine=engine, place=process.place))
    if process.entrypoint:
        words.insert(0, process.entrypoint)
    return True


_PEELERS = {
    "env": _peel_env,
    "sudo": _peel_sudo,
    "srun": _peel_srun,
    "mpirun": _peel_mpi,
    "mpiexec": _peel_mpi,
    "ssh": _peel_ssh,
    "docker": _peel_docker,
    "podman": _peel_docker,
    "nerdctl": _peel_docker,
    "timeout": _peel_timeout,
    "taskset": _peel_taskset,
}


def _conclude(process: _Process, scope: str) -> Outcome:
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


def _finish(process: _Process, start: Start, scope: str) -> Start:
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


def _conclude_shell(process: _Process, base: Outcome, scope: str) -> Outcome:
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
    if re.fullmatch(r"sbatch|source|\.", name):
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
        options["model"] = Option(value=_known(loose[0]), place=place)
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


_ALIASES = {
    "tp": "tensor_parallel_size",
    "tp_size": "tensor_parallel_size",
    "model_path": "model",
    "q": "quantization",
    "O": "optimization_level",
    "asc": "api_server_count",
}
_BARE = re.compile(r"(enable|disable|no|trust|skip|enforce|return|log|allow|use|async)_")


def read_options(words: Sequence[str], place: Place) -> tuple[dict[str, Option], list[str]]:
    """Options by snake_case name, and the loose words. A flag without a value reads "true"."""
    options: dict[str, Option] = {}
    loose: list[str] = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        match = re.match(r"--?([A-Za-z][\w.-]*)(?:=(.*))?$", word, re.DOTALL)
        if not match:
            loose.append(word)
            continue
        raw, value = match[1], match[2]
        if value is None and re.fullmatch(r"O\d", raw):
            raw, value = "O", raw[1]
        name = raw.replace("-", "_")
        name = _ALIASES.get(name, name)
        if value is None and rest and not _looks_like_option(rest[0]) and not _BARE.match(name):
            value = rest.pop(0)
        options[name] = Option(value="true" if value is None else _known(value), place=place)
    return options, loose


def _looks_like_option(word: str) -> bool:
    return bool(re.match(r"--?[A-Za-z]", word))


def read_installs(words: Sequence[str], place: Place) -> tuple[Install, ...]:
    """Packages named by `pip install`, `uv pip install` or `uv add`."""
    names = [word.rsplit("/", 1)[-1] for word in words]
    if names[:1] and re.fullmatch(r"python[\d.]*", names[0]) and names[1:3] == ["-m", "pip"]:
        names, words = names[2:], words[2:]
    if names[:2] == ["uv", "pip"]:
        names, words = names[1:], words[1:]
    if len(names) < 2 or not re.fullmatch(r"pip[\d.]*|uv", names[0]) or names[1] not in ("install", "add"):
        return ()
    found = []
    for word in words[2:]:
        match = re.fullmatch(r"([A-Za-z0-9][\w.-]*)(?:\[[\w,-]*\])?\s*((?:[=<>!~]=?|===).*)?", word)
        if match:
            exact = re.fullmatch(r"={2,3}\s*([^*,<>]+)", match[2] or "")
            name = re.sub(r"[-_.]+", "-", match[1]).lower()
            found.append(Install(package=name, version=exact[1] if exact else "", place=place))
    return tuple(found)


def read_curl(words: Sequence[str]) -> tuple[str, tuple[str, ...]] | None:
    """(url, payloads) of a curl command; None when it has no url."""
    url = next((word for word in words[1:] if re.search(r"^https?://|/v1/|localhost|/generate$", word)), "")
    payloads = []
    for index, word in enumerate(words[:-1]):
        if word in ("-d", "--data", "--data-raw", "--json", "--data-binary"):
            payloads.append(words[index + 1])
    return (url, tuple(payloads)) if url else None
