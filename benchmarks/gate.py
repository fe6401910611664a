"""How long the gate takes on a run of 64 requests x 30 cells, and the fingerprint of SmolLM2 the second time.

    python benchmarks/gate.py [--model smollm2] [--repeat 5]

Prints medians over repeats, interleaved. The gate is timed three ways: digests alone equal, every cell drifted (traces
opened and sized),and with one signed approval per cell. Not a test: a machine that is busy is slow.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np

from harness.approval.cabinet import file_approval, file_signature
from harness.approval.record import Approval
from harness.approval.signature import sign
from harness.baseline.accept import Acceptance, accept
from harness.baseline.shelf import Shelf
from harness.capture import Capture
from harness.digest import judged_digest
from harness.engine import Field
from harness.finished import FinishedRun, read_finished
from harness.release.gate_run import GateInputs, gate
from harness.store import Store
from harness.traces import PositionTable, RequestTable, Traces

REQUESTS, CELLS, POSITIONS, TOPK = 64, 30, 64, 5


def main() -> int:
    """Prints one line per measurement."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--repeat", type=int, default=5)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="samebits-bench-") as scratch:
        folder = Path(scratch)
        measures = gate_measures(folder) | {
            f"samebits fingerprint --model {arguments.model} (a new process)": fingerprint_measure(arguments.model),
            "samebits gate, everything equal (a new process)": command_measure(folder),
        }
        for name, seconds in interleave(measures, arguments.repeat).items():
            rest = f"{min(seconds):.2f} to {max(seconds):.2f}"
            print(f"{name:<64} median {statistics.median(seconds):6.3f} s   ({rest})")
    return 0


def interleave(measures: dict[str, Callable[[], None]], repeat: int) -> dict[str, list[float]]:
    """Seconds of each measure, one after another in every round; a first round is thrown away."""
    seconds: dict[str, list[float]] = {name: [] for name in measures}
    for turn in range(repeat + 1):
        for name, measure in measures.items():
            begun = time.perf_counter()
            measure()
            if turn:
                seconds[name].append(time.perf_counter() - begun)
    return seconds


def gate_measures(folder: Path) -> dict[str, Callable[[], None]]:
    """Runs, baselines and approvals, and the gate over them."""
    same, moved = write_run(folder / "same", seed=0), write_run(folder / "moved", seed=1)
    url = str(folder / "baselines")
    terms = Acceptance(author="bench", reason="bench", moment=datetime.now(UTC), keep=("logprobs",))
    accept(same, Shelf(url), (), terms)
    signers = sign_all(folder, same, moved)
    plain = GateInputs(baselines=url)
    signed = GateInputs(baselines=url, approvals=folder / "approvals", signers=signers)
    return {
        f"gate, {REQUESTS} requests x {CELLS} cells, everything equal": lambda: check(folder / "same", plain, 0),
        f"gate, {CELLS} cells drifted, located and sized": lambda: check(folder / "moved", plain, 1),
        f"gate, {CELLS} cells drifted, one signed approval each": lambda: check(folder / "moved", signed, 0),
    }


def check(folder: Path, inputs: GateInputs, code: int) -> None:
    """Gates and sees that the decision is the expected one."""
    decision = gate(read_finished(folder), inputs, datetime.now(UTC))
    assert decision.exit_code == code, decision.sentence


def command_measure(folder: Path) -> Callable[[], None]:
    """`samebits gate` as a person runs it, reports and all."""
    command = [
        sys.executable,
        "-m",
        "harness.cli",
        "gate",
        str(folder / "same"),
        "--baselines",
        str(folder / "baselines"),
    ]
    return lambda: run_quietly(command)


def fingerprint_measure(model: str) -> Callable[[], None]:
    """`samebits fingerprint` with an engine: the model's digest is remembered from the first round."""
    return lambda: run_quietly(
        [sys.executable, "-m", "harness.cli", "fingerprint", "--engine", "bundled", "--model", model]
    )


def run_quietly(command: list[str]) -> None:
    """Runs a command and expects it to succeed."""
    subprocess.run(command, check=True, capture_output=True)


def write_run(folder: Path, *, seed: int) -> FinishedRun:
    """A run's folder: CELLS cells, each with a capture of its own."""
    folder.mkdir(parents=True)
    store = Store(folder / "captures")
    rows = []
    for cell in range(CELLS):
        case = f"{cell:016x}"
        made = random_traces(1000 * seed + cell)
        digest = judged_digest(made)
        subject = (Field(name="package.torch", value=f"2.{seed}", field_class="identity", source="bench"),)
        store.write(
            Capture(
                case=case,
                traces=made,
                requested={},
                resolved={},
                observed={},
                subject=subject,
                process_nonce="p",
                repetition_nonce=case,
                session="s",
                judged_digest=digest,
                seconds=1.0,
            )
        )
        rows.append(verdict_row(cell, case, digest))
    (folder / "run.json").write_text(json.dumps(run_record(rows)))
    return read_finished(folder)


def random_traces(seed: int) -> Traces:
    """REQUESTS requests of POSITIONS positions with top-k lists."""
    random = np.random.default_rng(seed)
    n = REQUESTS * POSITIONS
    zeros, whole = np.zeros(REQUESTS), np.zeros(REQUESTS, dtype=np.int32)
    token = random.integers(0, 49_152, n).astype(np.int32)
    values = -np.sort(random.random((n, TOPK)), axis=1).astype(np.float32)
    return Traces(
        requests=RequestTable(
            id=tuple(f"request-{i:03d}" for i in range(REQUESTS)),
            sample=whole,
            companion=np.zeros(REQUESTS, dtype=bool),
            prompt_tokens=whole + 200,
            length=np.full(REQUESTS, POSITIONS, dtype=np.int64),
            finish_reason=("length",) * REQUESTS,
            cached_tokens=whole,
            preemptions=whole,
            arrival_s=zeros,
            first_token_s=zeros,
            finish_s=zeros,
        ),
        positions=PositionTable(
            token=token,
            pick=token,
            logprob=values[:, 0].copy(),
            topk_logprobs=values,
            topk_ids=random.integers(0, 49_152, (n, TOPK)).astype(np.int32),
            logits_digest=None,
        ),
        steps=None,
        counters=(),
    )


def verdict_row(cell: int, case: str, digest: str) -> dict[str, object]:
    """A PASS."""
    return {
        "cell": f"cell-{cell:02d}",
        "variant": "1-8",
        "label": f"cell-{cell:02d}[1-8]",
        "invariant": "",
        "rule": "topk",
        "replay": "golden",
        "axis": {"name": "max_num_seqs", "reference": 1, "variant": 8, "home_layer": "forward"},
        "corpus": {"name": "ragged", "digest": "c" * 64, "requests": REQUESTS, "longest_prompt": 1024, "weak": None},
        "verdict": "PASS",
        "expected": None,
        "foreseen": False,
        "reason": "equal",
        "claims": [],
        "caps": [],
        "floor": {"verdict": "same", "positions": 4096, "sentence": "same"},
        "comparison": None,
        "control": {
            "kind": "mode",
            "value": "free",
            "fired": True,
            "positions": 1,
            "differing_positions": 1,
            "verdict": "x",
        },
        "diagnosis": None,
        "undeclared": [],
        "error": None,
        "cases": {"reference": case, "floor": case, "variant": case},
        "digests": {"reference": digest, "floor": digest, "variant": digest},
    }


def run_record(rows: list[dict[str, object]]) -> dict[str, object]:
    """The record around the verdicts."""
    return {
        "schema": 1,
        "samebits": "0",
        "matrix": {"name": "bench", "path": "bench", "digest": "d" * 64},
        "engine": "bench",
        "model": "bench",
        "settings": {},
        "started": "2026-01-01T00:00:00Z",
        "finished": "2026-01-01T00:00:00Z",
        "seconds": {"total": 1.0, "workers": 1.0, "outside": 0.0},
        "exit_code": 0,
        "outcome": "",
        "plan": {"cells": CELLS, "pairs": CELLS, "cases": CELLS, "lifetimes": 1, "judged": CELLS, "digest": "e" * 64},
        "verdicts": rows,
        "cases": [],
        "fingerprint": {"observer": [], "subject": []},
        "cost": None,
    }


def sign_all(folder: Path, before: FinishedRun, after: FinishedRun) -> Path:
    """A signed approval of every cell's drift; returns the allowed signers."""
    key = folder / "key"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "", "-f", str(key)], check=True)
    now = datetime.now(UTC).replace(microsecond=0)
    for old, new in zip(before.pairs, after.pairs, strict=True):
        approval = Approval(
            cell=new.cell, variant=new.variant, engine=after.engine, model=after.model, kind="drift", rule=new.rule,
            corpus=new.corpus_digest, old=old.digests["reference"], new=new.digests["reference"], changed=(), size="",
            cause="", reason="bench", author="bench@example.org", change_author="bench@example.org", created=now,
            expires=now + timedelta(days=1),
        )  # fmt: skip
        file = file_approval(approval, folder / "approvals")
        file_signature(file, sign(file.read_bytes(), key))
    signers = folder / "allowed"
    kind, blob = Path(f"{key}.pub").read_text().split()[:2]
    signers.write_text(f"bench@example.org {kind} {blob}\n")
    return signers


if __name__ == "__main__":
    sys.exit(main())
