"""What has been seen of a Python file so far, and where in the program the reader stands."""

from __future__ import annotations

import ast
from dataclasses import dataclass, field

from harness.doctor.facts import Call, EnvSet, Install, Request, Start
from harness.doctor.finding import Place
from harness.doctor.readers.python_names import Names


@dataclass(slots=True, kw_only=True)
class Reading:
    """What has been seen so far, and where in the program we are."""

    path: str
    names: Names
    functions: tuple[str, ...] = ()
    branch: tuple[str, ...] = ()
    guard: str = ""
    missing: tuple[str, ...] = ()  # variables that an enclosing `not in os.environ` test names
    remote: bool = False  # inside a function or class that Ray runs elsewhere
    loops: list[ast.expr] = field(default_factory=list)
    settings: list[EnvSet] = field(default_factory=list)
    children: dict[str, list[EnvSet]] = field(default_factory=dict)  # settings of a copied environment, by name
    starts: list[Start] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    installs: list[Install] = field(default_factory=list)
    imports: list[tuple[str, int, str]] = field(default_factory=list)  # module, line, function
    called: dict[str, int] = field(default_factory=dict)  # first line at which a function is called at module level
    ray: ast.Call | None = None
    remote_starts: set[int] = field(default_factory=set)
    inner: set[EnvSet] = field(default_factory=set)  # settings made inside remote code
    patched: set[Place] = field(default_factory=set)  # settings made for the length of a test
    words: set[str] = field(default_factory=set)
    open: str = ""

    def place(self, node: ast.AST) -> Place:
        return Place(self.path, getattr(node, "lineno", 1))

    @property
    def function(self) -> str:
        return ".".join(self.functions)
