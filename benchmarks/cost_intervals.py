"""How often do the intervals of `samebits cost` miss, and how often does its rule call noise a cost?

Simulates sessions in the command's own order (off, on, off again, mirrored) under seven kinds of noise between
processes, without an effect and with a slowdown of 1.2. No engine runs. Deterministic.

    python benchmarks/cost_intervals.py [--sessions 300] [--spread 0.03] [--pairs 5 6]
"""

from __future__ import annotations

import argparse
import itertools
import math
from collections.abc import Callable

import numpy as np

from harness.cost.arm import COMPARED, OFF, OFF_AGAIN, ON
from harness.cost.interval import interval
from harness.cost.order import turns

Noise = Callable[[np.random.Generator, int, float], np.ndarray]


def autocorrelated(rng: np.random.Generator, n: int, spread: float, memory: float = 0.9) -> np.ndarray:
    """An AR(1) series of standard deviation `spread`."""
    values = np.empty(n)
    values[0] = rng.normal(0, spread)
    for i in range(1, n):
        values[i] = memory * values[i - 1] + rng.normal(0, spread * math.sqrt(1 - memory**2))
    return values


NOISES: dict[str, Noise] = {
    "independent, normal": lambda rng, n, spread: rng.normal(0, spread, n),
    "heavy tails (t, 3 degrees)": lambda rng, n, spread: rng.standard_t(3, n) * spread / math.sqrt(3),
    "skewed (exponential)": lambda rng, n, spread: rng.exponential(spread, n),
    "autocorrelated (0.9)": autocorrelated,
    "drift of 20 % and normal": lambda rng, n, spread: rng.normal(0, spread, n) + np.linspace(0, 0.2, n),
    "one process in ten 35 % late": lambda rng, n, spread: rng.normal(0, spread / 3, n) + (rng.random(n) < 0.1) * 0.3,
    "random walk": lambda rng, n, spread: np.cumsum(rng.normal(0, spread, n)),
}


def session(rng: np.random.Generator, noise: Noise, rounds: int, spread: float) -> dict[str, np.ndarray]:
    """Log times of each arm, by round."""
    order = turns(COMPARED, rounds)
    values = noise(rng, len(order), spread)
    return {arm: np.array([v for v, turn in zip(values, order, strict=True) if turn.arm == arm]) for arm in COMPARED}


def percentile(row: np.ndarray) -> bool:
    """Whether the percentile bootstrap's interval excludes 0."""
    n = len(row)
    means = row[np.array(list(itertools.product(range(n), repeat=n)))].mean(axis=1)
    low, high = np.quantile(means, [0.025, 0.975])
    return bool(low > 0 or high < 0)


def main() -> None:
    """Prints one line per noise and number of pairs: shares in percent."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", type=int, default=300)
    parser.add_argument("--spread", type=float, default=0.03)
    parser.add_argument("--pairs", type=int, nargs="+", default=[5, 6])
    options = parser.parse_args()
    print("noise, pairs: percentile excludes 1, interval excludes 1, called a cost; planted 1.2 found (percent)")
    for rounds, (name, noise) in itertools.product(options.pairs, NOISES.items()):
        rng = np.random.default_rng(1)
        counts = np.zeros(4)
        for _ in range(options.sessions):
            logs = session(rng, noise, rounds, options.spread)
            effect = logs[ON] - logs[OFF]
            floor, found = interval((logs[OFF_AGAIN] - logs[OFF]).tolist()), interval(effect.tolist())
            slowed = interval((effect + math.log(1.2)).tolist())
            counts += (
                percentile(effect), found.excludes_zero, found.excludes_zero and abs(found.mean) > floor.reach,
                slowed.excludes_zero and abs(slowed.mean) > floor.reach,
            )  # fmt: skip
        shares = ", ".join(f"{share:.1f}" for share in counts / options.sessions * 100)
        print(f"{name}, {rounds}: {shares}", flush=True)


if __name__ == "__main__":
    main()
