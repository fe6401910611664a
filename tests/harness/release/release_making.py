"""What the tests of baselines, approvals, gate and archive are made of: keys, command lines, records, traces."""

import contextlib
import io
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import numpy as np

from harness import cli
from harness.engine import Field
from harness.fingerprint import field_records
from harness.finished import finished_run
from harness.traces import PositionTable, RequestTable, Traces

DIGEST = {name: (name * 64)[:64] for name in "abcdef0123456789"}


@dataclass(frozen=True)
class Ended:
    """A command that ended."""

    code: int
    out: str
    err: str


def samebits(*arguments, **environment):
    """Runs the command line in this process, outside CI unless `environment` says so."""
    out, err = io.StringIO(), io.StringIO()
    variables = {name: value for name, value in os.environ.items() if name not in ("CI", "GITHUB_ACTIONS")}
    with (
        mock.patch.object(sys, "argv", ["samebits", *map(str, arguments)]),
        mock.patch.dict(os.environ, variables | environment, clear=True),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            cli.main()
        except SystemExit as end:
            return Ended(int(end.code or 0), out.getvalue(), err.getvalue())
    raise AssertionError("main() always exits")


def make_key(folder, name):
    """An SSH key without a passphrase; returns the private key's path."""
    key = Path(folder) / name
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "", "-f", str(key)], check=True)
    return key


def allow(file, *lines):
    """An allowed_signers file of (principal, key path, options)."""
    text = ""
    for principal, key, options in lines:
        kind, blob = Path(f"{key}.pub").read_text().split()[:2]
        text += f"{principal} {options + ' ' if options else ''}{kind} {blob}\n"
    Path(file).write_text(text)
    return Path(file)


def verdict(label="restart[same-new]", name="PASS", **changes):
    """One verdict of a run's record."""
    cell, _, rest = label.partition("[")
    base = {
        "cell": cell,
        "variant": rest.rstrip("]"),
        "label": label,
        "invariant": "Nothing changes.",
        "rule": "topk",
        "replay": "natural",
        "axis": {"name": "restart", "reference": "same", "variant": "new", "home_layer": "environment"},
        "corpus": {"name": "quick", "digest": DIGEST["c"], "requests": 12, "longest_prompt": 512, "weak": None},
        "verdict": name,
        "expected": None,
        "foreseen": False,
        "reason": f"because {name}",
        "claims": [],
        "caps": [],
        "floor": {"verdict": "same", "positions": 288, "sentence": "the reference twice: 288 positions same"},
        "comparison": {"requests": 12, "positions": 288, "elements": 5136, "witnessed": 288,
                       "differing_positions": 0, "differing_requests": 0, "fields": {}},
        "control": {"kind": "mode", "value": "free", "fired": True, "positions": 96, "differing_positions": 96,
                    "verdict": "96 of 96 positions differ"},
        "diagnosis": None,
        "undeclared": [],
        "error": None,
        "cases": {"reference": "aa", "floor": "bb", "variant": "cc", "control_reference": None,
                  "control_floor": None, "control_variant": None},
        "digests": {"reference": DIGEST["a"], "floor": DIGEST["a"], "variant": DIGEST["b" if name == "FAIL" else "a"]},
    }  # fmt: skip
    return base | changes


def record(*verdicts, planned=None, **changes):
    """A run's record."""
    fields = [Field(name="package.torch", value="2.13.0", field_class="identity", source="test")]
    return {
        "schema": 1,
        "samebits": "0.1.0",
        "matrix": {"name": "quick", "path": "cells/quick", "digest": DIGEST["d"], "left_out": []},
        "engine": "fake",
        "model": "fake",
        "settings": {},
        "started": "2026-03-01T00:00:00Z",
        "finished": "2026-03-01T00:01:00Z",
        "seconds": {"total": 1.0, "workers": 0.9, "outside": 0.1},
        "exit_code": 0,
        "outcome": "well",
        "plan": {"cells": 1, "pairs": planned or len(verdicts), "cases": 3, "lifetimes": 1, "judged": len(verdicts),
                 "digest": DIGEST["e"]},
        "verdicts": list(verdicts),
        "cases": [],
        "fingerprint": {"observer": field_records(fields), "subject": field_records(fields)},
        "cost": None,
    } | changes  # fmt: skip


def run_of(*verdicts, folder=None, digest=DIGEST["f"], **changes):
    """A finished run."""
    return finished_run(record(*verdicts, **changes), folder=folder, digest=digest)


def traces(lengths=(3, 2), seed=0, topk=2, companions=0):
    """Random traces of requests r0, r1, …, the last `companions` of them not judged."""
    random = np.random.default_rng(seed)
    rows, n = len(lengths), sum(lengths)
    zeros = np.zeros(rows)
    tokens = random.integers(0, 100, n).astype(np.int32)
    return Traces(
        requests=RequestTable(
            id=tuple(f"r{i}" for i in range(rows)), sample=np.zeros(rows, dtype=np.int32),
            companion=np.array([i >= rows - companions for i in range(rows)]),
            prompt_tokens=np.full(rows, 5, dtype=np.int32), length=np.array(lengths, dtype=np.int64),
            finish_reason=("length",) * rows, cached_tokens=np.zeros(rows, dtype=np.int32),
            preemptions=np.zeros(rows, dtype=np.int32), arrival_s=zeros, first_token_s=zeros, finish_s=zeros,
        ),
        positions=PositionTable(
            token=tokens, pick=tokens.copy(), logprob=random.standard_normal(n).astype(np.float32),
            topk_ids=np.argsort(random.random((n, 100)), axis=1)[:, :topk].astype(np.int32),
            topk_logprobs=-np.sort(random.random((n, topk)), axis=1).astype(np.float32), logits_digest=None,
        ),
        steps=None, counters=(),
    )  # fmt: skip
