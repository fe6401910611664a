"""The same rules against a running engine: what it was asked, what it settled on, what is observed inside it.

It knows no engine's process: the mappings are brought by the caller. Pure functions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from harness.doctor.diagnose import rule_hits
from harness.doctor.engines import name_hardware
from harness.doctor.facts import Document, EnvSet, Option, Start
from harness.doctor.finding import Finding, Hit, Place, Severity, make_finding
from harness.doctor.launch import Launch, Scan
from harness.doctor.rules import RULES, RULES_BY_ID
from harness.doctor.settings import DoctorSettings
from harness.doctor.variables import VARIABLES, read_value
from harness.engine import Scalar

# What an engine calls a thing inside, by the option that asks for it.
_SAME = {
    "attention_backend": ("attention_backend", "attn_backend"),
    "model": ("model", "model_path"),
    "enable_prefix_caching": ("enable_prefix_caching", "prefix_caching"),
}
_HARDWARE_FIELDS = ("accelerator", "device_name", "gpu_name", "accelerator_model", "device")


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """What a running engine shows. `environment` is the worker's own, not the parent's."""

    requested: Mapping[str, Scalar] = field(default_factory=dict)
    resolved: Mapping[str, Scalar] = field(default_factory=dict)
    observed: Mapping[str, Scalar] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class StaticSetting:
    """One value that the files give: a variable (upper case) or an option (snake_case); None when computed."""

    name: str
    value: str | None
    place: Place


Observe = Callable[[str, str, Mapping[str, Scalar]], Observation]


def check_observed(
    engine: str,
    requested: Mapping[str, Scalar],
    resolved: Mapping[str, Scalar],
    observed: Mapping[str, Scalar],
    environment: Mapping[str, str],
    *,
    settings: DoctorSettings | None = None,
) -> tuple[Finding, ...]:
    """The launch and setting rules over a running engine, and every requested value that is not in force."""
    launch = observed_launch(engine, requested, resolved, observed, environment)
    scan = Scan(documents=(launch.document,), launches=(launch,))
    chosen = settings or DoctorSettings()
    findings = {
        (rule.id, hit.place, hit.subject): make_finding(rule, hit, chosen.severity(rule))
        for rule in RULES
        if chosen.severity(rule) is not Severity.OFF
        for hit in rule_hits(rule, scan)
    }
    differing = RULES_BY_ID["live-differs"]
    found = list(findings.values())
    if chosen.severity(differing) is not Severity.OFF:
        hits = _replaced(launch.start.place, requested, {**resolved, **observed})
        found.extend(make_finding(differing, hit, chosen.severity(differing)) for hit in hits)
    return tuple(sorted(found))


def observed_launch(
    engine: str,
    requested: Mapping[str, Scalar],
    resolved: Mapping[str, Scalar],
    observed: Mapping[str, Scalar],
    environment: Mapping[str, str],
) -> Launch:
    """A launch made of observations, so that the same rules can be asked."""
    place = Place(f"live:{engine}", 1)
    merged = {**requested, **resolved, **observed}
    options = {name: Option(value=_spell(value), place=place) for name, value in sorted(merged.items())}
    for name, spellings in _SAME.items():
        known = next((options[spelling] for spelling in spellings if spelling in options), None)
        if known is not None:
            options.setdefault(name, known)
    settings = tuple(
        EnvSet(name=name, value=value, place=place)
        for name, value in sorted(environment.items())
        if name in VARIABLES or name.startswith(("VLLM_", "SGLANG_", "DEEPINFER_", "NCCL_", "CUBLAS"))
    )
    hardware = next((str(merged[name]) for name in _HARDWARE_FIELDS if merged.get(name)), "")
    start = Start(engine=engine, place=place, options=options, settings=settings, hardware=name_hardware(hardware))
    document = Document(path=place.path, kind="live", settings=settings, starts=(start,))
    return Launch(
        start=start,
        document=document,
        settings=settings,
        blocked=(),
        requests=(),  # the harness sends every sampling field itself
        calls=(),
        open="",
        head_dim=_number(merged.get("head_dim")),
        options=options,
    )


def _number(value: Scalar | None) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _spell(value: Scalar) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _replaced(place: Place, requested: Mapping[str, Scalar], now: Mapping[str, Scalar]) -> Iterable[Hit]:
    for name, value in sorted(requested.items()):
        if name in now and _spell(now[name]) != _spell(value):
            yield Hit(place, f"{name} was requested as `{_spell(value)}` and is `{_spell(now[name])}`", name)


def static_settings(launches: Iterable[Launch], engine: str) -> tuple[StaticSetting, ...]:
    """What the files say about `engine`: known variables and options of its launches, last value each."""
    found: dict[str, StaticSetting] = {}
    for launch in launches:
        if launch.engine != engine:
            continue
        for setting in launch.settings:
            if setting.name in VARIABLES and not setting.unset:
                found[setting.name] = StaticSetting(name=setting.name, value=setting.value, place=setting.place)
        for name, option in launch.options.items():
            found[name] = StaticSetting(name=name, value=option.value, place=option.place)
    return tuple(found[name] for name in sorted(found))


def compare_static_live(
    static: Iterable[StaticSetting], observed: Mapping[str, Scalar], *, environment: Mapping[str, str] | None = None
) -> tuple[Finding, ...]:
    """Where the files and the running engine differ, placed where the files say it.

    `environment` None means that it was not observed; a variable it lacks is a difference.
    """
    rule = RULES_BY_ID["live-differs"]
    found = []
    for setting in static:
        message = _difference(setting, observed, environment)
        if message:
            found.append(make_finding(rule, Hit(setting.place, message, setting.name)))
    return tuple(sorted(found))


def _difference(setting: StaticSetting, observed: Mapping[str, Scalar], environment: Mapping[str, str] | None) -> str:
    if setting.value is None:
        return ""
    variable = VARIABLES.get(setting.name)
    if variable is not None and environment is not None:
        there = environment.get(setting.name)
        if there is None:
            return f"the files set {setting.name}={setting.value}; the worker's environment does not have it"
        if there != setting.value and read_value(variable, there) != read_value(variable, setting.value):
            return f"the files set {setting.name}={setting.value}; the worker has `{there}`"
        if there != setting.value and not variable.want:
            return f"the files set {setting.name}={setting.value}; the worker has `{there}`"
        return ""
    wanted = setting.value
    plain = setting.name.removeprefix("no_")
    if plain != setting.name and plain in observed and wanted == "true":
        wanted = "false"
    spellings = _SAME.get(plain, (plain,))
    name = next((spelling for spelling in spellings if spelling in observed), None)
    if name is None or _spell(observed[name]).lower() == wanted.lower():
        return ""
    return f"the files say {setting.name}={setting.value}; the running engine has `{_spell(observed[name])}`"
