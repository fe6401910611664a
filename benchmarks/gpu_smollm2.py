"""SmolLM2's own weights on a GPU against digests of its logits that another host's CPU computed.

`split FOLDER` cuts the fetched GGUF into parts small enough to be carried, `join PARTS...` puts it together, checks its
SHA-256 and lays it where the models lie, `write` computes smollm2_digests.json on this CPU, `check` computes the same
steps on the GPU and, with `--here`, on this host's CPU too. Exit code 1 if a digest differs.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from gpu_model import PAGE, engine_config, run_cases

from engines.bundled.arithmetic import open_arithmetic
from engines.bundled.batch import Arithmetic
from engines.bundled.config import Model
from engines.bundled.gpu import open_gpu_arithmetic, why_not
from engines.bundled.models.cache import file_sha256
from engines.bundled.models.smollm2 import SHA256, gguf_path, open_smollm2

DIGESTS = Path(__file__).with_name("smollm2_digests.json")
NUM_PAGES = 600
PART_BYTES = 52 << 20
THREADS = min(16, len(os.sched_getaffinity(0)))


def split(folder: Path) -> None:
    """Writes part0, part1, ... of the GGUF."""
    folder.mkdir(parents=True, exist_ok=True)
    data = gguf_path().read_bytes()
    for number, start in enumerate(range(0, len(data), PART_BYTES)):
        (folder / f"part{number}").write_bytes(data[start : start + PART_BYTES])
        print(folder / f"part{number}", len(data[start : start + PART_BYTES]))


def join(parts: list[Path]) -> int:
    """Puts the GGUF where the models lie. 1 if it is not the one this project names."""
    target = gguf_path()
    target.parent.mkdir(parents=True, exist_ok=True)
    draft = target.with_suffix(".part")
    draft.write_bytes(b"".join(part.read_bytes() for part in parts))
    if (found := file_sha256(draft)) != SHA256:
        print(f"{draft}: expected SHA-256 {SHA256}, got {found}; are these all parts, in order?")
        return 1
    draft.replace(target)
    print(f"{target}: SHA-256 as expected")
    return 0


def digests_of(arithmetic: Arithmetic, model: Model) -> dict[str, str]:
    """Digest of every case's logits."""
    found = {}
    for case, digest, count in run_cases(arithmetic, model.config, NUM_PAGES):
        found[case] = digest
        print(f"{case}: {count} logits, {digest[:16]}", flush=True)
    return found


def check(model: Model, *, here: bool) -> int:
    """How many cases differ from the digests brought along."""
    brought = json.loads(DIGESTS.read_text())
    if brought["model"] != model.digest:
        print(f"model digest {model.digest}, the digests are of {brought['model']}")
        return 1
    config = engine_config("portable", NUM_PAGES, THREADS)
    machines = {"gpu": lambda: open_gpu_arithmetic(model, config, "cuda")}
    if here:
        machines["this host's CPU"] = lambda: open_arithmetic(model, config)
    wrong = 0
    for name, open_one in machines.items():
        begin = time.monotonic()
        arithmetic = open_one()
        print(name, arithmetic.describe(), flush=True)
        found = digests_of(arithmetic, model)
        differing = [case for case in brought["digests"] if found.get(case) != brought["digests"][case]]
        wrong += len(differing)
        print(f"{name}: {len(differing)} of {len(brought['digests'])} cases differ {differing}, "
              f"{time.monotonic() - begin:.0f} s", flush=True)  # fmt: skip
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("action", choices=("split", "join", "write", "check"))
    parser.add_argument("paths", nargs="*", type=Path)
    parser.add_argument("--here", action="store_true", help="check this host's CPU, too")
    options = parser.parse_args()
    if options.action == "split":
        split(options.paths[0])
        return 0
    if options.action == "join":
        return join(options.paths)
    model = open_smollm2().model()
    if options.action == "write":
        arithmetic = open_arithmetic(model, engine_config("portable", NUM_PAGES, THREADS))
        found = {"schema": 1, "model": model.digest, "page": PAGE, "digests": digests_of(arithmetic, model)}
        DIGESTS.write_text(json.dumps(found, indent=1) + "\n")
        return 0
    if reason := why_not():
        print(f"UNSUPPORTED: {reason}")
        return 3
    return int(check(model, here=options.here) > 0)


if __name__ == "__main__":
    sys.exit(main())
