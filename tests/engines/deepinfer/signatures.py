"""Reads signatures and defaults out of source files, without importing them."""

import ast
from pathlib import Path

METHODS = (
    ("sampling_params.py", "SamplingParams", "__init__"),
    ("entrypoints/llm.py", "LLM", "__init__"),
    ("entrypoints/llm.py", "LLM", "generate"),
)


def read(package: Path) -> dict[str, list[list[str]]]:
    """Method to (parameter, default as source; "" without one), for a package folder."""
    return {f"{name}.{method}": _parameters(package / file, name, method) for file, name, method in METHODS}


def _parameters(file, name, method):
    tree = ast.parse(file.read_text(encoding="utf-8"))
    owner = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)
    found = next(node for node in owner.body if isinstance(node, ast.FunctionDef) and node.name == method)
    names = [argument.arg for argument in found.args.args]
    defaults = [""] * (len(names) - len(found.args.defaults)) + [ast.unparse(one) for one in found.args.defaults]
    extra = [[f"**{found.args.kwarg.arg}", ""]] if found.args.kwarg else []
    return [list(pair) for pair in zip(names, defaults, strict=True)] + extra
