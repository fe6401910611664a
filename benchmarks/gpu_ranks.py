"""Tensor parallelism on GPUs: logits of TP 1, 2 and 4 against the CPU's digests, and tokens a second.

    python benchmarks/gpu_ranks.py [--collectives gloo|nccl] [--sizes 1 2 4] [--seconds 280] [--out FILE]

With `gloo` the ranks take the cards of the machine in turn, so that one card is enough: they share it, and what they
exchange goes through host memory. With `nccl` each rank needs a card of its own. The model has SmolLM2's shape and
hashed weights; digests of its logits were made on another machine (gpu_digests.json), and are made again on this
host's CPU with `--here`. Control: the same steps in `free` over the most ranks must differ.

It stops starting things after `--seconds` and says what it left out. Exit code: 0 all digests equal and the control
fired, 1 a difference or a silent control, 3 something was left out or cannot run here. Times are of whole steps by the
wall clock: launches, collectives and the way of the logits to the host included, sampling not.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from gpu_model import Sequences, engine_config, hashed_model, prompt, run_cases
from model_files import write_folder

from engines.bundled.arithmetic import open_arithmetic
from engines.bundled.batch import Arithmetic, Closes, Ranked
from engines.bundled.config import Model
from engines.bundled.errors import BundledError
from engines.bundled.gpu import open_gpu_arithmetic, why_not
from engines.bundled.gpu.driver import count_devices
from engines.bundled.models.catalogue import open_source

DIGESTS = Path(__file__).with_name("gpu_digests.json")
NUM_PAGES = 2400
THREADS = min(4, len(os.sched_getaffinity(0)))  # of each rank: only log-softmax and the start-up check use them
ROWS, PROMPT, STEPS = (1, 16), 64, 32
START = time.monotonic()
Row = dict[str, object]


def say(*words: object) -> None:
    print(f"[{time.monotonic() - START:6.1f}]", *words, flush=True)


@contextmanager
def opened(model: Model, folder: Path, size: int, collectives: str, arithmetic: str) -> Iterator[Arithmetic]:
    """The arithmetic over `size` ranks on cards; one rank is the plain GPU arithmetic."""
    config = engine_config(arithmetic, NUM_PAGES, THREADS)
    if size == 1:
        found: Arithmetic = open_gpu_arithmetic(model, config, "cuda")
    else:
        from engines.bundled.parallel.ranks import open_parallel

        config = dataclasses.replace(config, tensor_parallel_size=size, collectives=collectives)
        found = open_parallel(str(folder), model, config, device="cuda")
    try:
        yield found
    finally:
        if isinstance(found, Closes):
            found.close()


def differing(arithmetic: Arithmetic, model: Model, expected: dict[str, str]) -> tuple[list[str], int]:
    """Cases whose digest is not the expected one, and how many logits were compared."""
    wrong, compared = [], 0
    for case, digest, count in run_cases(arithmetic, model.config, NUM_PAGES):
        compared += count
        if digest != expected[case]:
            wrong.append(case)
    return wrong, compared


def decode_speed(arithmetic: Arithmetic, model: Model, rows: int) -> float:
    """Tokens a second of STEPS decode steps of `rows` sequences behind PROMPT tokens each, after two steps untimed."""
    sequences, which = Sequences(rows, PROMPT + STEPS + 2, NUM_PAGES), list(range(rows))
    prompts = [prompt(model.config, row, PROMPT) for row in which]
    arithmetic.forward(sequences.step(which, prompts, everything=False))
    begin = 0.0
    for step in range(STEPS + 2):
        if step == 2:
            begin = time.monotonic()
        arithmetic.forward(sequences.step(which, [[100 + step + row] for row in which], everything=False))
    return rows * STEPS / (time.monotonic() - begin)


def measure(model: Model, folder: Path, size: int, collectives: str, expected: dict[str, str]) -> Row:
    """One row of the result."""
    begin = time.monotonic()
    with opened(model, folder, size, collectives, "portable") as arithmetic:
        started = time.monotonic() - begin
        wrong, compared = differing(arithmetic, model, expected)
        speeds = {f"tokens/s, {rows} rows": round(decode_speed(arithmetic, model, rows), 1) for rows in ROWS}
        row: Row = {
            "tensor_parallel_size": size, "collectives": collectives if size > 1 else "none", "logits": compared,
            "cases differing": wrong, **speeds, "start s": round(started, 1),
        }  # fmt: skip
        if isinstance(arithmetic, Ranked):
            counts = arithmetic.counts()
            row |= {name: [count[name] for count in counts] for name in ("weight_bytes", "kv_bytes", "steps")}
        row["facts"] = arithmetic.describe()
    say(f"TP {size} {row['collectives']}:", compared, "logits,", len(wrong), "cases differing;", speeds)
    return row


def control_fires(model: Model, folder: Path, size: int, collectives: str, expected: dict[str, str]) -> bool:
    """True if `free` over these ranks gives other logits in every case."""
    with opened(model, folder, size, collectives, "free") as arithmetic:
        wrong, _ = differing(arithmetic, model, expected)
    say(f"control free, TP {size}: {len(wrong)} of {len(expected)} cases differ")
    return len(wrong) == len(expected)


def expected_digests(model: Model, *, here: bool) -> dict[str, str]:
    """By case: of the machine the digests came from, and with `here` of this host's CPU, which must agree."""
    name = "smollm2-shaped: "
    brought = {key.removeprefix(name): value for key, value in json.loads(DIGESTS.read_text()).items() if name in key}
    if here:
        cpu = open_arithmetic(model, engine_config("portable", NUM_PAGES, len(os.sched_getaffinity(0))))
        wrong, compared = differing(cpu, model, brought)
        say("this host's CPU:", compared, "logits,", len(wrong), "cases differing")
        if wrong:
            raise SystemExit(f"this host's CPU gives other bits than the digests were made with: {wrong}")
    return brought


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--collectives", choices=("gloo", "nccl"), default="gloo")
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--seconds", type=float, default=280.0)
    parser.add_argument("--here", action="store_true", help="compute the digests on this host's CPU, too")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if reason := why_not():
        say("UNSUPPORTED:", reason)
        return 3
    with tempfile.TemporaryDirectory() as place:
        folder = write_folder(hashed_model(), Path(place))
        model = open_source(str(folder)).model()
        result, code = run(model, folder, options)
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    say("exit", code)
    return code


def run(model: Model, folder: Path, options: argparse.Namespace) -> tuple[Row, int]:
    """All rows, the control, and the exit code."""
    cards, rows, left_out = count_devices(), [], []
    sizes = [size for size in options.sizes if options.collectives == "gloo" or size <= cards]
    left_out += [
        f"TP {size}: nccl needs a card for each rank, {cards} are here" for size in options.sizes if size not in sizes
    ]
    expected = expected_digests(model, here=options.here)
    for size in sizes:
        if time.monotonic() - START > options.seconds:
            left_out.append(f"TP {size}: no time left")
            continue
        try:
            rows.append(measure(model, folder, size, options.collectives, expected))
        except BundledError as error:
            left_out.append(f"TP {size}: {error}")
    fired, most = None, max(sizes, default=1)
    if most == 1 or time.monotonic() - START > options.seconds:
        left_out.append("control: no time left" if most > 1 else "control: no size above 1")
    else:
        fired = control_fires(model, folder, most, options.collectives, expected)
    for words in left_out:
        say("LEFT OUT", words)
    wrong = fired is False or any(row["cases differing"] for row in rows)
    result: Row = {"schema": 1, "cards": cards, "rows": rows, "control fired": fired, "left out": left_out}
    return result, 1 if wrong else 3 if left_out or not rows else 0


if __name__ == "__main__":
    sys.exit(main())
