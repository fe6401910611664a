"""One reader per kind of file: text in, facts out. A reader judges nothing and executes nothing."""

from __future__ import annotations

from harness.doctor.facts import MAX_STARTS, Document, Problem, overflow
from harness.doctor.source import Source


def read_document(source: Source) -> Document:
    """The facts of one source; what cannot be read becomes the document's problem."""
    if source.unreadable:
        unreadable = Problem(line=1, text=source.unreadable)
        return Document(path=source.path, kind=source.kind, problem=unreadable)
    # Each reader brings its own parser: only the kinds that occur are imported.
    if source.kind == "python":
        from harness.doctor.readers.python import read_python as read
    elif source.kind == "shell":
        from harness.doctor.readers.shell import read_shell as read
    elif source.kind == "dockerfile":
        from harness.doctor.readers.dockerfile import read_dockerfile as read
    elif source.kind == "dotenv":
        from harness.doctor.readers.dotenv import read_dotenv as read
    elif source.kind == "systemd":
        from harness.doctor.readers.systemd import read_systemd as read
    elif source.kind == "yaml":
        from harness.doctor.readers.yaml_file import read_yaml as read
    elif source.kind == "jsonl":
        from harness.doctor.readers.data_files import read_jsonl as read
    elif source.kind == "json":
        from harness.doctor.readers.data_files import read_json as read
    else:
        from harness.doctor.readers.data_files import read_toml as read
    document = read(source.path, source.text)
    inner = sum(len(start.settings) for start in document.starts[: MAX_STARTS + 1])
    problem = overflow(len(document.starts), len(document.settings) + inner // 10, len(document.requests))
    if problem is not None:
        return Document(path=source.path, kind=source.kind, problem=problem, text=source.text)
    return document
