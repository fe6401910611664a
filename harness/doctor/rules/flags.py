"""How a flag is set: overridable, late, under a condition, lost on the way, contradicted, false, unreadable, misspelt.

It knows the table of variables and no engine. A setting is judged wherever it stands; naming the variable is enough.
"""

from __future__ import annotations

from collections.abc import Iterator

from harness.doctor.facts import EnvSet
from harness.doctor.finding import Hit, Rule, Severity
from harness.doctor.launch import Launch, Scan, near_variable
from harness.doctor.variables import FLAGS, VARIABLES, Variable, read_value

_PROMISES = frozenset(FLAGS)


def _flag(setting: EnvSet) -> Variable | None:
    return VARIABLES[setting.name] if setting.name in _PROMISES else None


def find_overridable(scan: Scan) -> Iterator[Hit]:
    """A flag that something else can override before it takes effect."""
    for setting in scan.settings:
        if setting.overridable and _flag(setting) is not None:
            yield Hit(
                setting.place,
                f"{setting.name} is set by `{setting.overridable}`: a value that is already there wins",
                setting.name,
            )


def find_conditional(scan: Scan) -> Iterator[Hit]:
    """A flag set only on some accelerators, with no word said on the others."""
    for setting in scan.settings:
        if setting.guard and _flag(setting) is not None and not setting.unset:
            yield Hit(
                setting.place,
                f"{setting.name} is set only under `{setting.guard}`; elsewhere it is skipped without a word",
                setting.name,
            )


def find_late(scan: Scan) -> Iterator[Hit]:
    """A flag set after something has read it."""
    for setting in scan.settings:
        if setting.late and setting.name in VARIABLES:
            yield Hit(setting.place, f"{setting.name} is set too late: {setting.late}", setting.name)


def find_not_passed(scan: Scan) -> Iterator[Hit]:
    """A flag that is set and does not reach the process that needs it."""
    for launch in scan.launches:
        for lost in launch.blocked:
            variable = VARIABLES.get(lost.setting.name)
            if variable is None or variable.engine not in ("any", launch.engine):
                continue
            yield Hit(lost.place, f"{variable.name} does not reach the engine: {lost.reason}", variable.name)
    for document in scan.documents:
        for lost in document.blocked:
            if lost.setting.name in VARIABLES:
                yield Hit(lost.place, f"{lost.setting.name} reaches nothing: {lost.reason}", lost.setting.name)


def _contradicts(before: EnvSet, after: EnvSet) -> bool:
    """Whether `after` undoes what `before` set, on a path that can run both."""
    variable = VARIABLES[after.name]
    if before.unset or _exclusive(before, after):
        return False
    said = read_value(variable, before.value)
    wanted = "false" if variable.want == "0" else "true"
    if said != wanted:
        return False
    return after.unset or read_value(variable, after.value) not in (wanted, "unknown")


def _exclusive(left: EnvSet, right: EnvSet) -> bool:
    """Two arms of one condition."""
    for a, b in zip(left.branch, right.branch, strict=False):
        if a != b:
            return a.rsplit(":", 1)[0] == b.rsplit(":", 1)[0]
    return False


def _undone(settings: tuple[EnvSet, ...]) -> Iterator[tuple[EnvSet, EnvSet]]:
    last: dict[tuple[str, str], EnvSet] = {}
    for setting in settings:
        if setting.name not in _PROMISES:
            continue
        key = (setting.name, setting.scope)
        before = last.get(key)
        if before is not None and _contradicts(before, setting):
            yield before, setting
        last[key] = setting


def find_contradicted(scan: Scan) -> Iterator[Hit]:
    """A flag set, then unset or set to the opposite."""
    for document in scan.documents:
        for before, after in _undone(document.settings):
            yield _contradiction(before, after)
    for launch in scan.launches:
        settings = tuple(item for item in launch.settings)
        by_name: dict[str, EnvSet] = {}
        for setting in settings:
            before_other = by_name.get(setting.name)
            crosses = before_other is not None and before_other.place.path != setting.place.path
            if (
                crosses
                and before_other is not None
                and setting.name in _PROMISES
                and _contradicts(before_other, setting)
            ):
                yield _contradiction(before_other, setting)
            by_name[setting.name] = setting


def _contradiction(before: EnvSet, after: EnvSet) -> Hit:
    what = "is unset again" if after.unset else f"becomes `{after.value}`"
    where = f"line {before.place.line}"
    if before.place.path != after.place.path:
        where = f"{before.place.path}:{before.place.line}"
    return Hit(after.place, f"{after.name} {what} after it was set to `{before.value}` at {where}", after.name)


def find_false(scan: Scan) -> Iterator[Hit]:
    """A flag with a value that the engine reads as off."""
    undone = {(hit.place, hit.subject) for hit in find_contradicted(scan)}
    for setting in scan.settings:
        variable = _flag(setting)
        if variable is None or setting.unset or variable.want == "0" or setting.value is None:
            continue
        if read_value(variable, setting.value) == "false" and (setting.place, setting.name) not in undone:
            shown = setting.value or "(empty)"
            yield Hit(setting.place, f"{setting.name} is `{shown}`, which {variable.engine} reads as off", setting.name)


def find_unreadable(scan: Scan) -> Iterator[Hit]:
    """A flag with a value at which the engine stops."""
    for setting in scan.settings:
        variable = _flag(setting)
        if variable is None or setting.unset or setting.value is None:
            continue
        if read_value(variable, setting.value) == "unreadable":
            wanted = "a number" if variable.reader == "int" else "true/false, 1/0, yes/no or y/n"
            shown = setting.value or "(empty)"
            message = f"{setting.name} is `{shown}`, but {variable.engine} accepts only {wanted} and fails at start"
            yield Hit(setting.place, message, setting.name)


def find_misspelt(scan: Scan) -> Iterator[Hit]:
    """A variable nobody reads, one slip away from one that counts."""
    for setting in scan.settings:
        near = near_variable(setting.name)
        if near is not None and not setting.unset:
            yield Hit(setting.place, f"{setting.name} is read by nobody; did you mean {near}?", setting.name)


def find_open(launch: Launch) -> Iterator[Hit]:
    """A launch whose flag may come from somewhere we cannot read."""
    flag = {"vllm": "VLLM_BATCH_INVARIANT", "deepinfer": "DEEPINFER_BATCH_INVARIANT"}.get(launch.engine)
    if not launch.open or flag is None or launch.misspelt:
        return
    if launch.state(flag) == "absent" and not any(lost.setting.name == flag for lost in launch.blocked):
        yield Hit(launch.start.place, f"whether {flag} is set cannot be told: {launch.open}", flag)


RULES = (
    Rule(
        id="flag-overridable",
        engine="any",
        severity=Severity.WARNING,
        title="A deterministic flag that something else can override",
        why="Whoever starts the process may carry another value; then the mode is off and nothing says so.",
        mend="Assign the value outright, or fail when another value is already there.",
        scan=find_overridable,
    ),
    Rule(
        id="flag-conditional",
        engine="any",
        severity=Severity.WARNING,
        title="A deterministic flag under an accelerator test that skips silently",
        why="On another accelerator the same program runs without the mode and without a word.",
        mend="Raise in the other branch, or set the flag everywhere and let the engine refuse.",
        scan=find_conditional,
    ),
    Rule(
        id="flag-late",
        engine="any",
        severity=Severity.ERROR,
        title="A flag set after the import that reads it",
        why="A value read at import or at interpreter start does not change when the environment does.",
        mend="Set it before the import, or in the shell, unit or container that starts the process.",
        facts="vLLM 0.26.0 and 0.32.0: kernel modules read the mode at import; PYTHONHASHSEED is read at start.",
        scan=find_late,
    ),
    Rule(
        id="flag-not-passed",
        engine="any",
        severity=Severity.ERROR,
        title="A flag set in the parent that never reaches the worker",
        why="Containers, sudo, srun, ssh, Ray workers and unexported shell variables begin without it.",
        mend="Pass it on: `export`, `docker run -e`, `srun --export=ALL`, `sudo --preserve-env=`, env_vars of Ray.",
        scan=find_not_passed,
    ),
    Rule(
        id="flag-contradicted",
        engine="any",
        severity=Severity.ERROR,
        title="A flag that is contradicted later",
        why="The last value wins; the line people read is the first.",
        mend="Keep one of the two.",
        scan=find_contradicted,
    ),
    Rule(
        id="flag-false",
        engine="any",
        severity=Severity.ERROR,
        title="A flag with a value the engine reads as off",
        why="The line looks like the mode and is its opposite.",
        mend="Set it to 1, or remove the line.",
        facts="DeepInfer reads only 0, the empty string, false and False as off; vLLM reads bool(int(value)).",
        scan=find_false,
    ),
    Rule(
        id="flag-unreadable",
        engine="any",
        severity=Severity.ERROR,
        title="A flag with a value at which the engine stops",
        why="The engine parses the value strictly and raises when it first reads it.",
        mend="Set it to 1.",
        facts='vLLM 0.26.0 and 0.32.0: int("true") raises; SGLang 0.5.23: only true/1/yes/y and false/0/no/n.',
        scan=find_unreadable,
    ),
    Rule(
        id="flag-misspelt",
        engine="any",
        severity=Severity.ERROR,
        title="A variable that nearly spells a known one",
        why="Engines ignore names they do not know, so the mode is off.",
        mend="Use the spelling the message gives.",
        scan=find_misspelt,
    ),
    Rule(
        id="open-environment",
        engine="any",
        severity=Severity.NOTE,
        title="A launch whose environment cannot be known from the files read",
        why="Part of the environment comes from outside; silence here would not mean that the mode is on.",
        mend="Give the doctor the missing file as well, or check the running engine with --live.",
        launch=find_open,
    ),
)
