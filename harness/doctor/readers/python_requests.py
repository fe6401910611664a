"""Requests built in Python: SamplingParams objects, sampling dicts, OpenAI and Anthropic clients, posted JSON.

It knows call shapes. A field is a literal, None, drawn from a clock or a random source, or computed.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence

from harness.doctor.facts import Field, FieldKind, Request
from harness.doctor.finding import Place
from harness.doctor.readers.bodies import NESTED, is_prompted, url_api
from harness.doctor.readers.python_names import Names
from harness.doctor.readers.python_starts import engine_of

_CLOCKS = re.compile(r"^(time|datetime)\.|\.(now|utcnow|timestamp|time_ns|perf_counter)$")
_RANDOM = re.compile(
    r"^(random|secrets|uuid|numpy\.random)\.|^os\.(urandom|getpid)$|^torch\.(randint|seed|initial_seed|random\.seed)$|"
    r"^(hash|id)$"
)
_SEEDED = re.compile(
    r"^random\.Random$|^numpy\.random\.(default_rng|RandomState|SeedSequence|seed)$|^random\.seed$|^uuid\.uuid[35]$"
)
_CLIENT_CALLS = (
    (".chat.completions.create", "chat"),
    (".chat.completions.parse", "chat"),
    (".completions.create", "completion"),
    (".responses.create", "responses"),
    (".messages.create", "messages"),
    (".messages.stream", "messages"),
)
_SAMPLING_KEYS = frozenset({"temperature", "top_p", "top_k", "max_new_tokens", "sampling_seed", "n", "max_tokens"})
_POSTERS = re.compile(r"^(requests|httpx|aiohttp)\.(post|request)$|\.post$")
_MANY = re.compile(r"(^|_)(prompts|texts|inputs|questions|requests|batch|conversations|messages_list|examples)$")


def read_request_call(names: Names, name: str, node: ast.Call, path: str, loops: Sequence[ast.expr]) -> list[Request]:
    """The requests one call builds: none or one."""
    engine = engine_of(name)
    if engine and name.rsplit(".", 1)[-1] == "SamplingParams":
        return [_params(names, node, engine, path, loops)]
    if name.endswith((".generate", ".async_generate", ".chat", ".beam_search")):
        return _read_generate(names, name, node, path, loops)
    text = _call_name(node.func)
    for ending, kind in _CLIENT_CALLS:
        if text.endswith(ending):
            return _read_client(names, node, kind, path, loops)
    if _POSTERS.search(name or text):
        return _read_post(names, node, path, loops)
    return []


def _call_name(node: ast.expr) -> str:
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return "." + ".".join(reversed(parts))


def _params(names: Names, node: ast.Call, engine: str, path: str, loops: Sequence[ast.expr]) -> Request:
    fields, loose = _keywords(names, node, path)
    return Request(
        api=engine,
        place=Place(path, node.lineno),
        fields=fields,
        open=loose or bool(node.args),
        shared=_loops_over_requests(loops),
    )


def _loops_over_requests(loops: Sequence[ast.expr]) -> bool:
    """Inside a loop over things, not over a count: repeating one request is no sharing."""
    return any(not (isinstance(loop, ast.Call) and ast.unparse(loop.func) == "range") for loop in loops)


def _keywords(names: Names, node: ast.Call, path: str) -> tuple[dict[str, Field], bool]:
    fields: dict[str, Field] = {}
    loose = False
    for keyword in node.keywords:
        if keyword.arg is None or keyword.arg == "extra_body":
            table = names.literal(keyword.value)
            loose = not (isinstance(table, ast.Dict) and _table(names, table, path, fields)) or loose
        else:
            fields[keyword.arg] = read_field(names, keyword.value, path)
    return fields, loose


def _table(names: Names, table: ast.Dict, path: str, fields: dict[str, Field]) -> bool:
    """Adds a dict display's items; False when some of them cannot be known."""
    complete = True
    for key, value in zip(table.keys, table.values, strict=True):
        name = names.text(key) if key is not None else None
        if name is None:
            complete = False
        else:
            fields[name] = read_field(names, value, path)
    return complete


def read_field(names: Names, node: ast.expr, path: str) -> Field:
    """What one value is, as far as the text tells."""
    place = Place(path, node.lineno)
    found = names.literal(node)
    if isinstance(found, ast.Constant):
        none = found.value is None
        return Field(kind="none" if none else "constant", value="" if none else str(found.value), place=place)
    if isinstance(found, ast.UnaryOp) and isinstance(found.operand, ast.Constant):
        return Field(kind="constant", value=ast.unparse(found), place=place)
    kind = _source_kind(names, found) if found is not None else "computed"
    return Field(kind=kind, value="", place=place)


def _source_kind(names: Names, node: ast.expr) -> FieldKind:
    for inner in ast.walk(node):
        if isinstance(inner, ast.Call):
            name = names.dotted(inner.func) or _call_name(inner.func)
            if _CLOCKS.search(name):
                return "clock"
            if _RANDOM.search(name) and not _SEEDED.search(name) and not _seeds_itself(names, name):
                return "random"
    return "computed"


def _seeds_itself(names: Names, name: str) -> bool:
    """`random.seed(7)` or `np.random.seed(7)` elsewhere in the file fixes the module's own generator."""
    owner = name.rsplit(".", 1)[0]
    return f"{owner}.seed" in names.seeded


def _read_generate(names: Names, name: str, node: ast.Call, path: str, loops: Sequence[ast.expr]) -> list[Request]:
    owner = names.literal(node.func.value) if isinstance(node.func, ast.Attribute) else None
    engine = ""
    if isinstance(owner, ast.Call):
        engine = engine_of(names.dotted(owner.func))
    keyword = {item.arg: item.value for item in node.keywords}
    given = keyword.get("sampling_params", node.args[1] if len(node.args) > 1 else None)
    table = names.literal(given) if given is not None else None
    if isinstance(table, ast.Dict):
        return _read_sampling_dict(names, table, engine, path, loops)
    if isinstance(table, ast.Call) and engine_of(names.dotted(table.func)):
        return _read_shared(names, node, table, path)
    plain = given is None and None not in keyword and not name.endswith(".beam_search")
    if engine == "vllm" and plain:
        return [Request(api="vllm", place=Place(path, node.lineno), bare=True)]
    return []


def _read_sampling_dict(
    names: Names, table: ast.Dict, engine: str, path: str, loops: Sequence[ast.expr]
) -> list[Request]:
    fields: dict[str, Field] = {}
    complete = _table(names, table, path, fields)
    if not (engine or "sglang" in names.modules) or not _SAMPLING_KEYS & set(fields):
        return []
    return [
        Request(
            api=engine or "sglang",
            place=Place(path, table.lineno),
            fields=fields,
            open=not complete,
            shared=_loops_over_requests(loops),
        )
    ]


def _read_shared(names: Names, node: ast.Call, made: ast.Call, path: str) -> list[Request]:
    """One SamplingParams object handed to a call that serves many prompts."""
    if not node.args or not _is_many(names, node.args[0]):
        return []
    fields, loose = _keywords(names, made, path)
    engine = engine_of(names.dotted(made.func))
    return [Request(api=engine, place=Place(path, made.lineno), fields=fields, open=loose, shared=True)]


def _is_many(names: Names, node: ast.expr) -> bool:
    found = names.literal(node)
    if isinstance(found, ast.List):
        return len(found.elts) > 1
    if isinstance(found, ast.ListComp):
        return True
    return isinstance(node, ast.Name) and found is node and bool(_MANY.search(node.id))


def _read_client(names: Names, node: ast.Call, kind: str, path: str, loops: Sequence[ast.expr]) -> list[Request]:
    api = _client_api(names, node, kind)
    if not api:
        return []
    fields, loose = _keywords(names, node, path)
    return [
        Request(
            api=api,
            place=Place(path, node.lineno),
            fields=fields,
            open=loose or bool(node.args),
            shared=_loops_over_requests(loops),
        )
    ]


def _client_api(names: Names, node: ast.Call, kind: str) -> str:
    """Which service a client call talks to, by the client it was made from; "" when the file knows none."""
    if kind == "messages":
        return "anthropic" if "anthropic" in names.modules else ""
    if "openai" not in names.modules:
        return ""
    owner = node.func
    while isinstance(owner, ast.Attribute):
        owner = owner.value
    made = names.literal(owner)
    own = isinstance(made, ast.Call) and names.dotted(made.func).startswith("openai.")
    bases = [_base(names, made)] if own and isinstance(made, ast.Call) else [_base(names, c) for c in names.clients]
    if not bases:
        return "endpoint"
    hosted = all(base == "hosted" for base in bases)
    if not hosted:
        return "endpoint"
    return "openai-responses" if kind == "responses" else "openai"


def _base(names: Names, client: ast.Call) -> str:
    given = next((keyword.value for keyword in client.keywords if keyword.arg == "base_url"), None)
    if given is None:
        unknown = any(keyword.arg is None for keyword in client.keywords)
        return "endpoint" if unknown or "OPENAI_BASE_URL" in names.strings else "hosted"
    text = names.text(given)
    return "hosted" if text and url_api(text).startswith("openai") else "endpoint"


def _read_post(names: Names, node: ast.Call, path: str, loops: Sequence[ast.expr]) -> list[Request]:
    url = names.words(ast.List(elts=node.args[:1], ctx=ast.Load())) or [""]
    address = (url or [""])[0].replace("\0", "x").split("?")[0].rstrip("/")
    if not re.search(r"/(completions|generate|responses|messages)$|/api/chat$", address):
        return []
    payload = next((keyword.value for keyword in node.keywords if keyword.arg == "json"), None)
    table = names.literal(payload)
    if not isinstance(table, ast.Dict):
        return []
    fields: dict[str, Field] = {}
    complete = _table(names, table, path, fields)
    for key in NESTED:
        complete = _read_nested(names, table, key, path, fields) and complete
    if not is_prompted(fields, address):
        return []
    place = Place(path, node.lineno)
    shared = _loops_over_requests(loops)
    return [Request(api=url_api(address), place=place, fields=fields, open=not complete, shared=shared)]


def _read_nested(names: Names, table: ast.Dict, key: str, path: str, fields: dict[str, Field]) -> bool:
    """Adds the fields of an inner dict (`sampling_params`, `options`, `parameters`); False when it cannot be known."""
    inner = names.item(table, key)
    if inner is None:
        return True
    sampling = names.literal(inner)
    return isinstance(sampling, ast.Dict) and _table(names, sampling, path, fields)
