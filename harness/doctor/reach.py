"""How files reach each other: from documents to launches.

The rule (docs/doctor.md says it in prose):

1. What stands in the start's own file reaches it (in compose, Kubernetes and Helm: its own service or container).
2. What stands in files of the same folder that start no engine themselves reaches it, unless it is a container or a
   systemd unit: those get only their own settings, the files they name, and the Dockerfile they are built from.
3. A file that runs the start's file by name reaches it, and so does a module that the start's file imports.
"""

from __future__ import annotations

import posixpath
from collections.abc import Iterable
from dataclasses import replace

from harness.doctor.facts import Blocked, Document, EnvSet, Option, Start
from harness.doctor.finding import Place
from harness.doctor.launch import Launch, Scan
from harness.doctor.variables import VARIABLES

_AMBIENT = frozenset({"python", "shell", "dotenv", "dockerfile", "toml", "json"})


def find_launches(documents: Iterable[Document]) -> Scan:
    """Joins documents into launches."""
    files = tuple(documents)
    index = _Index(files)
    launches = [_make_launch(index, document, start) for document in files for start in document.starts if start.engine]
    return Scan(documents=files, launches=tuple(launches))


class _Index:
    """Documents by folder, by path and by the files they run."""

    def __init__(self, documents: tuple[Document, ...]) -> None:
        self.by_path = {document.path: document for document in documents}
        self.by_folder: dict[str, list[Document]] = {}
        self.runners: dict[str, list[tuple[Document, Start]]] = {}
        self.by_name: dict[str, list[Document]] = {}
        for document in documents:
            self.by_folder.setdefault(posixpath.dirname(document.path), []).append(document)
            self.by_name.setdefault(posixpath.basename(document.path), []).append(document)
            for start in document.starts:
                if start.target:
                    self.runners.setdefault(posixpath.basename(start.target), []).append((document, start))

    def wrappers(self, document: Document) -> list[tuple[Document, Start]]:
        """Commands elsewhere that run this file by name; the longest agreeing path wins."""
        found = []
        for owner, start in self.runners.get(posixpath.basename(document.path), []):
            target = posixpath.normpath(start.target).lstrip("./")
            beside = posixpath.dirname(owner.path) == posixpath.dirname(document.path)
            nested = "/" in target and f"/{document.path}".endswith(f"/{target}")
            alone = len(self.by_name.get(posixpath.basename(document.path), [])) == 1
            if owner is not document and (beside or nested or alone):
                found.append((owner, start))
        return found

    def imported(self, document: Document) -> list[Document]:
        """Modules of the scan that this file imports."""
        found = []
        for module in document.imports:
            tail = module.replace(".", "/") + ".py"
            name = posixpath.basename(tail)
            for other in self.by_name.get(name, []):
                if other is not document and f"/{other.path}".endswith(f"/{tail}"):
                    found.append(other)  # noqa: PERF401 - three conditions read better apart
        return found

    def named(self, document: Document, name: str) -> Document | None:
        """A file that this one names by a relative path, or whose path ends like the one it names."""
        clean = name.lstrip("-")
        direct = posixpath.normpath(posixpath.join(posixpath.dirname(document.path), clean))
        if direct in self.by_path:
            return self.by_path[direct]
        same = [other for other in self.by_name.get(posixpath.basename(clean), []) if other is not document]
        beside = [other for other in same if posixpath.dirname(other.path) == posixpath.dirname(document.path)]
        if len(same) == 1:
            return same[0]
        return beside[0] if beside else None


def _starts_engine(document: Document) -> bool:
    return any(start.engine for start in document.starts)


def _make_launch(index: _Index, document: Document, start: Start) -> Launch:
    around = _around(index, document, start)
    wrappers = [pair for pair in index.wrappers(document) if not start.scope]
    hardware = start.hardware or next((wrapper.hardware for _, wrapper in wrappers if wrapper.hardware), "")
    start = _with_config(index, document, replace(start, hardware=hardware))
    settings: list[EnvSet] = []
    blocked: list[Blocked] = []
    is_open = start.open
    for other in around:
        settings.extend(other.settings)
        is_open = is_open or other.open
        if other.problem is not None:
            is_open = is_open or f"{posixpath.basename(other.path)} could not be parsed"
    for owner, wrapper in wrappers:
        settings.extend(item for item in wrapper.settings if item not in settings)
        blocked.extend(wrapper.blocked)
        is_open = is_open or wrapper.open
        for name in wrapper.env_files:
            linked = index.named(owner, name)
            settings.extend(linked.settings if linked is not None else ())
    extra, missing = _env_files(index, document, start)
    settings.extend(extra)
    settings.extend(start.settings)
    settings.extend(_overrides(index, document, start))
    is_open = is_open or missing or _missing_source(index, document)
    blocked.extend(start.blocked)
    blocked.extend(lost for other in (*around, document) for lost in other.blocked)
    blocked.extend(_compose_dotenv(index, document, start, settings))
    companions = _companions(index, document, around, [owner for owner, _ in wrappers])
    return Launch(
        start=start,
        document=document,
        settings=tuple(settings),
        blocked=_really_blocked(blocked, settings),
        requests=tuple(request for other in companions for request in other.requests),
        calls=tuple(call for other in companions for call in other.calls),
        open=is_open,
        head_dim=next((other.head_dim for other in index.by_folder[_folder(document)] if other.head_dim), None),
        options=dict(start.options),
    )


def _with_config(index: _Index, document: Document, start: Start) -> Start:
    """Options that `--config FILE` adds; a file that is not here leaves them open."""
    given = start.options.get("config")
    if given is None:
        return start
    linked = index.named(document, given.value) if given.value else None
    if linked is None or linked.kind not in ("yaml", "json") or linked.problem is not None:
        return replace(start, options_open=True)
    from harness.doctor.nodes import Unparsable, parse_yaml

    options = dict(start.options)
    try:
        roots = parse_yaml(linked.text)
    except Unparsable:
        return replace(start, options_open=True)
    for root in roots:
        for key, node, line in root.lines():
            place = Place(linked.path, line)
            value = node.value if node.kind == "scalar" else None
            options.setdefault(key.replace("-", "_"), Option(value=value, place=place))
    return replace(start, options=options)


def _folder(document: Document) -> str:
    return posixpath.dirname(document.path)


def _around(index: _Index, document: Document, start: Start) -> list[Document]:
    """Files whose settings reach the start although they stand elsewhere (rules 2 and 3)."""
    if start.reach == "container":
        return _built_from(index, document, start)
    if start.reach:
        return []
    sourced = [index.named(document, name.rsplit("/", 1)[-1]) for name in document.sources]
    runners = {owner.path for owner, _ in index.wrappers(document)}  # what they hand on is known command by command
    folder = index.by_folder[_folder(document)]
    beside = [other for other in folder if other.kind in _AMBIENT and other.path not in runners]
    others = [*beside, *index.imported(document), *(other for other in sourced if other is not None)]
    return _without_starts(document, others)


def _without_starts(document: Document, others: list[Document]) -> list[Document]:
    seen: dict[str, Document] = {}
    for other in others:
        if other is not document and not _starts_engine(other):
            seen.setdefault(other.path, other)
    return list(seen.values())


def _built_from(index: _Index, document: Document, start: Start) -> list[Document]:
    if start.build is None:
        return []
    folder = posixpath.normpath(posixpath.join(_folder(document), start.build))
    folder = "" if folder == "." else folder
    return [other for other in index.by_folder.get(folder, []) if other.kind == "dockerfile"]


def _env_files(index: _Index, document: Document, start: Start) -> tuple[list[EnvSet], str]:
    settings: list[EnvSet] = []
    missing = ""
    for name in start.env_files:
        linked = index.named(document, name)
        if linked is None:
            missing = missing or f"the environment file `{name}` is not among the files read"
        else:
            settings.extend(linked.settings)
    return settings, missing


def _overrides(index: _Index, document: Document, start: Start) -> list[EnvSet]:
    """compose's override file for the same service, and a unit's drop-ins: both come after the file itself."""
    if start.reach == "unit":
        drop_ins = index.by_folder.get(f"{document.path}.d", [])
        return [setting for other in drop_ins for setting in other.settings]
    if document.kind != "yaml" or start.reach != "container" or "services:" not in document.text:
        return []
    others = [other for other in index.by_folder[_folder(document)] if other is not document]
    named = [other for other in others if other.kind == "yaml" and "override" in posixpath.basename(other.path)]
    return [setting for other in named for setting in other.settings if setting.scope == start.scope]


def _missing_source(index: _Index, document: Document) -> str:
    if document.kind != "shell":
        return ""
    for name in document.sources:
        if index.named(document, name.rsplit("/", 1)[-1].replace("\0", "")) is None and not _is_environment(name):
            shown = name.replace("\0", "…")
            return f"the sourced file `{shown}` is not among the files read"
    return ""


def _is_environment(name: str) -> bool:
    """Activation scripts and shell start-up files set no engine variable."""
    plain = ("bin/activate", "conda.sh", ".bashrc", ".profile", "modules/init/bash", "lmod/init/bash", "setvars.sh")
    return name.endswith(plain) or name in ("activate",)


def _compose_dotenv(index: _Index, document: Document, start: Start, settings: list[EnvSet]) -> list[Blocked]:
    """compose reads `.env` to fill in `${NAME}`; without env_file nothing of it reaches the container."""
    if document.kind != "yaml" or start.reach != "container" or "services" not in document.text:
        return []
    named = {setting.name for setting in settings}
    passed = _passed_through(document)
    beside = index.by_path.get(posixpath.join(_folder(document), ".env"))
    if beside is None or beside.path in {posixpath.normpath(name) for name in start.env_files}:
        return []
    reason = f"compose fills in `${{NAME}}` from .env but hands none of it to service `{start.scope}`"
    return [
        Blocked(setting=setting, place=setting.place, reason=reason)
        for setting in beside.settings
        if setting.name not in named and setting.name not in passed
    ]


def _passed_through(document: Document) -> set[str]:
    """Names that a service lists without a value: `- NAME` or `NAME:`."""
    found = set()
    for line in document.text.splitlines():
        word = line.strip().lstrip("- ").rstrip(":").strip("\"'")
        if word in VARIABLES:
            found.add(word)
    return found


def _companions(index: _Index, document: Document, around: list[Document], owners: list[Document]) -> list[Document]:
    """Files whose requests and calls belong to the launch."""
    beside = _without_starts(document, index.by_folder[_folder(document)])
    seen = {other.path: other for other in (document, *around, *owners, *beside)}
    return [seen[path] for path in sorted(seen)]


def _really_blocked(blocked: list[Blocked], settings: list[EnvSet]) -> tuple[Blocked, ...]:
    """A lost setting that something else sets as well is not missing."""
    live = {setting.name for setting in settings if not setting.unset}
    seen: dict[tuple[str, str, int], Blocked] = {}
    for lost in blocked:
        if lost.setting.name not in live:
            seen.setdefault((lost.setting.name, lost.place.path, lost.place.line), lost)
    return tuple(seen.values())
