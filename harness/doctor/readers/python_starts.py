"""Engine constructors in Python: `vllm.LLM(...)`, `sglang.Engine(...)`, `tensorrt_llm.LLM(...)`, DeepInfer's `LLM`."""

from __future__ import annotations

import ast
import json

from harness.doctor.engines import CONSTRUCTORS, MODULES, name_hardware
from harness.doctor.facts import Option, Start
from harness.doctor.finding import Place
from harness.doctor.readers.python_names import Names

_ALIASES = {"model_path": "model", "tp_size": "tensor_parallel_size", "max_running_requests": "max_running_requests"}


def engine_of(name: str) -> str:
    """The engine a dotted name belongs to by its first part, or "" (SGLang's image generation is another engine)."""
    if name.startswith("sglang.multimodal_gen"):
        return ""
    return MODULES.get(name.split(".", 1)[0], "")


def read_start(names: Names, name: str, node: ast.Call, place: Place) -> Start | None:
    """A start when the call constructs an engine; None otherwise."""
    engine = engine_of(name)
    if not engine or name.rsplit(".", 1)[-1] not in CONSTRUCTORS[engine]:
        return None
    options: dict[str, Option] = {}
    loose = False
    if node.args:
        options["model"] = Option(value=names.text(node.args[0]), place=place)
    for keyword in node.keywords:
        if keyword.arg is None:
            loose = not _add_table(names, keyword.value, options, place) or loose
            continue
        key = _ALIASES.get(keyword.arg, keyword.arg)
        options[key] = Option(value=_value(names, keyword.value), place=Place(place.path, keyword.value.lineno))
    device = options.get("device")
    return Start(
        engine=engine,
        place=place,
        options=options,
        options_open=loose,
        hardware=name_hardware(device.value) if device and device.value else "",
    )


def _add_table(names: Names, value: ast.expr, options: dict[str, Option], place: Place) -> bool:
    table = names.literal(value)
    if isinstance(table, ast.Call) and names.dotted(table.func) == "dict" and not table.args:
        pairs = [(keyword.arg, keyword.value) for keyword in table.keywords]
    elif isinstance(table, ast.Dict):
        pairs = [(names.text(key) if key else None, item) for key, item in zip(table.keys, table.values, strict=True)]
    else:
        return False
    for key, item in pairs:
        if key is None:
            return False
        options[_ALIASES.get(key, key)] = Option(value=_value(names, item), place=Place(place.path, item.lineno))
    return True


def _value(names: Names, node: ast.expr) -> str | None:
    """A constant as an option would spell it: true and false in lower case, None as "none", dicts as JSON."""
    found = names.literal(node)
    if isinstance(found, ast.Constant):
        if found.value is None:
            return "none"
        return str(found.value).lower() if isinstance(found.value, bool) else str(found.value)
    if isinstance(found, ast.Dict):
        return _json(names, found)
    if isinstance(found, ast.Call) and found.keywords and not found.args:
        pairs = {keyword.arg: names.text(keyword.value) for keyword in found.keywords if keyword.arg}
        return json.dumps({**pairs, "type": names.dotted(found.func).rsplit(".", 1)[-1]})
    return None


def _json(names: Names, table: ast.Dict) -> str:
    pairs = {}
    for key, value in zip(table.keys, table.values, strict=True):
        name = names.text(key) if key is not None else None
        if name is not None:
            pairs[name] = names.text(value)
    return json.dumps(pairs)
