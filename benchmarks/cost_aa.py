"""How often does `samebits cost` call noise a cost, and does it find a planted slowdown?

Repeats A/A sessions of the bundled engine (both arms arithmetic=portable) and sessions with a planted slowdown, each a
whole measurement in fresh processes, and counts what was resolved. Needs a machine without other work.

    python benchmarks/cost_aa.py [--repetitions 20] [--planted 5] [--factor 1.2] [--model tiny] [--pairs 6]
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

from harness.cost.measure import CostRequest, measure

SAME = ("arithmetic=portable",)


def session(options: argparse.Namespace, slowed: float, folder: Path) -> dict[str, object]:
    """One measurement."""
    request = CostRequest(
        engine="bundled", model=options.model, mode=None, assignments=(), on=SAME, off=SAME, shown=("none",),
        corpus=options.corpus, concurrency=options.concurrency, rates=None, trace=None, count=options.requests,
        pairs=options.pairs, ttft_limit=None, itl_limit=None, seed=0, slowed=slowed, out=folder, overwrite=False,
        deadline_s=600.0,
    )  # fmt: skip
    return measure(request, lambda _text: None)[0]


def told(record: dict[str, object]) -> str:
    """A session in a line."""
    primary = record["primary"]
    assert isinstance(primary, dict)
    identical = primary["identical"]
    return (f"{record['state']:<14} {primary['ratio']:.4f} ({primary['low']:.4f} to {primary['high']:.4f}), identical "
            f"arms {identical['low']:.4f} to {identical['high']:.4f}, {record['seconds']:.0f} s")  # fmt: skip


def main() -> None:
    """Runs the sessions and prints each, then the counts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=20)
    parser.add_argument("--planted", type=int, default=5)
    parser.add_argument("--factor", type=float, default=1.2)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--corpus", default="quick")
    parser.add_argument("--concurrency", default="1,4")
    parser.add_argument("--requests", type=int, default=24)
    parser.add_argument("--pairs", type=int, default=6)
    options = parser.parse_args()
    begun = time.monotonic()
    for name, slowed, count in (("A/A", 1.0, options.repetitions), (f"planted {options.factor:g}", options.factor,
                                                                    options.planted)):  # fmt: skip
        states = []
        for number in range(count):
            with tempfile.TemporaryDirectory(prefix="samebits-cost-") as folder:
                record = session(options, slowed, Path(folder) / "cost")
            states.append(record["state"])
            print(f"{name} {number + 1:>2}/{count}: {told(record)}", flush=True)
        print(f"{name}: resolved {states.count('resolved')}, not resolved {states.count('not resolved')} of {count}")
    print(f"{time.monotonic() - begun:.0f} s in all")


if __name__ == "__main__":
    main()
