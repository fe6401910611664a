"""Commands that run another command: sudo, env, srun, mpirun, ssh, docker and the like, and what they keep from it.

It knows which variables each of them lets through; the program itself is none of its business.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from harness.doctor.engines import image_engine, name_hardware
from harness.doctor.facts import Blocked, EnvSet, Image
from harness.doctor.finding import Place
from harness.doctor.process import UNKNOWN, Process, known_text

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


def peel_wrapper(process: Process, slurm_export: str) -> bool:
    """Takes one wrapper off; False when the word in front is the program itself."""
    word = process.words[0]
    assigned = re.fullmatch(r"([A-Za-z_]\w*)=(.*)", word, re.DOTALL)
    if assigned:
        process.set_value(assigned[1], known_text(assigned[2]))
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


def _peel_valued(process: Process, name: str) -> bool:
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


def _peel_timeout(process: Process, _: str) -> bool:
    del process.words[0]
    _drop_options(process.words, frozenset({"-s", "--signal", "-k", "--kill-after"}))
    del process.words[:1]
    return True


def _peel_taskset(process: Process, _: str) -> bool:
    del process.words[0]
    _drop_options(process.words, frozenset())
    del process.words[:1]
    return True


def _peel_env(process: Process, _: str) -> bool:
    del process.words[0]
    for name, value in _drop_options(process.words, frozenset({"-u", "--unset", "-C", "--chdir"})):
        if name in ("-i", "--ignore-environment"):
            process.keep_only(set(), "`env -i` starts the command with an empty environment")
        if name in ("-u", "--unset"):
            process.settings.pop(value, None)
    return True


def _peel_sudo(process: Process, _: str) -> bool:
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


def _peel_srun(process: Process, slurm_export: str) -> bool:
    del process.words[0]
    job = process.settings.get("SLURM_EXPORT_ENV")
    export = job.value or "" if job is not None else slurm_export
    for name, value in _drop_options(process.words, _SRUN_VALUED):
        if name == "--export":
            export = value
        if name in ("--gres", "-C", "--constraint", "--gpus", "-G"):
            process.hardware = process.hardware or name_hardware(value)
    apply_slurm_export(process.settings, process.blocked, process.place, export)
    return True


def _peel_sbatch(process: Process, _: str) -> bool:
    """sbatch hands on what `--export` says, then runs the script."""
    _peel_srun(process, "")
    process.words = ["bash", *process.words] if process.words else []
    return bool(process.words)


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


def _peel_mpi(process: Process, _: str) -> bool:
    del process.words[0]
    words = process.words
    passed: set[str] = set()
    remote = False
    while words and words[0].startswith("-"):
        word = words.pop(0)
        if word in ("-genvall", "--genvall"):
            remote = False
        elif word in ("-genv", "-env") and len(words) >= 2:
            process.set_value(words.pop(0), known_text(words.pop(0)))
        elif word == "-x" and words:
            name, equals, value = words.pop(0).partition("=")
            passed.add(name)
            if equals:
                process.set_value(name, known_text(value))
        elif word in ("--mca", "-mca"):
            del words[:2]
        elif word in _MPI_VALUED and words:
            words.pop(0)
            remote = remote or word in ("-H", "--host", "-host", "--hostfile", "-hostfile", "-machinefile")
    if remote:
        passed |= {name for name, setting in process.settings.items() if setting.place == process.place}
        process.keep_only(passed, "`mpirun` does not send it to other hosts without `-x`")
    return True


def _peel_ssh(process: Process, _: str) -> bool:
    del process.words[0]
    _drop_options(process.words, frozenset({"-p", "-i", "-o", "-l", "-J", "-F"}))
    del process.words[:1]
    process.keep_only(set(), "`ssh` does not carry the local environment to the other host")
    if len(process.words) == 1:
        process.words = ["bash", "-c", process.words[0]]
    return True


def _peel_docker(process: Process, _: str) -> bool:
    words = process.words
    if words[1:2] == ["compose"] or len(words) < 2 or words[1] not in ("run", "exec", "create"):
        return False
    action = words[1]
    del words[:2]
    passed = _read_docker_options(process)
    process.keep_only(passed, f"`docker {action}` passes no variable without `-e` or `--env-file`")
    if any(UNKNOWN in name for name in process.env_files):
        process.open = "an --env-file whose name is computed"
    if process.open or process.env_files:
        process.blocked = []  # what is not named may be in there
    process.contained = True
    _take_image(process, action)
    if process.entrypoint:
        words.insert(0, process.entrypoint)
    return True


def _peel_terminal(process: Process, _: str) -> bool:
    """tmux and screen: the last word is a command line, when it has more than one word."""
    if " " not in process.words[-1] or not {"new-session", "new", "new-window", "neww", "-dmS"} & set(process.words):
        return False
    process.words = ["bash", "-c", process.words[-1]]
    return True


def _read_docker_options(process: Process) -> set[str]:
    """Takes docker's options; returns the variables they pass. Computed options leave the environment open."""
    words = process.words
    given = _drop_options(words, _DOCKER_VALUED)
    while words and words[0] == UNKNOWN:
        process.open = process.open or "options that are computed"
        del words[0]
        given += _drop_options(words, _DOCKER_VALUED)
    passed: set[str] = set()
    for name, value in given:
        if name in ("-e", "--env"):
            variable, equals, text = value.partition("=")
            passed.add(variable)
            if equals:
                process.set_value(variable, known_text(text))
        elif name == "--env-file":
            process.env_files.append(value)
        elif name == "--gpus":
            process.hardware = process.hardware or name_hardware(value)
        elif name == "--entrypoint":
            process.entrypoint = value
    return passed


def _take_image(process: Process, action: str) -> None:
    process.image = process.words.pop(0) if process.words else ""
    if action == "exec":
        process.image = ""
        process.open = process.open or "the running container's own environment"
    elif process.image and UNKNOWN not in process.image:
        engine = image_engine(process.image)
        process.images.append(Image(ref=process.image, engine=engine, place=process.place))


_PEELERS = {
    "env": _peel_env,
    "sudo": _peel_sudo,
    "srun": _peel_srun,
    "sbatch": _peel_sbatch,
    "mpirun": _peel_mpi,
    "mpiexec": _peel_mpi,
    "ssh": _peel_ssh,
    "docker": _peel_docker,
    "podman": _peel_docker,
    "nerdctl": _peel_docker,
    "tmux": _peel_terminal,
    "screen": _peel_terminal,
    "timeout": _peel_timeout,
    "taskset": _peel_taskset,
}
