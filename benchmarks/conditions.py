"""What each condition of the contract costs by itself, and rollback decoding beside the two pure modes.

Run as `python benchmarks/conditions.py --model smollm2 --rounds 3 --out FILE`. Every line of the table is the engine
with one thing changed, over one of four workloads, all in one process on the same weights; rounds are interleaved and
the ratio is that of (its time / the time of `portable` with nothing changed) in the same round. What claims to be
invariant must give the tokens of the unchanged engine, or the run ends with an error; for the others the share of equal
tokens is printed. Logprobs are reported unless the line says otherwise.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
sys.path[0] = str(Path(__file__).resolve().parents[1])  # `benchmarks` is a package of the root

from benchmarks import measured  # noqa: E402
from engines.bundled.arithmetic.portable import KernelArithmetic  # noqa: E402
from engines.bundled.arithmetic.weights import Weights, pack_weights  # noqa: E402
from engines.bundled.config import EngineConfig, Model  # noqa: E402
from engines.bundled.draft import open_drafter  # noqa: E402
from engines.bundled.engine import Engine  # noqa: E402
from engines.bundled.fast import FastPath, in_bfloat16  # noqa: E402
from engines.bundled.kernels.library import load  # noqa: E402
from engines.bundled.models.catalogue import open_source  # noqa: E402
from engines.bundled.request import Request, Sampling  # noqa: E402
from engines.bundled.sequence import Sequence  # noqa: E402

POOL = 8_192  # tokens of keys and values
SAMPLING = Sampling(
    temperature=0.0, top_p=1.0, top_k=0, min_p=0.0, repetition_penalty=1.0, frequency_penalty=0.0, presence_penalty=0.0,
    seed=None, max_tokens=32, min_tokens=0, ignore_eos=True, stop=(), stop_token_ids=(), logit_bias=(), logprobs=5,
)  # fmt: skip


@dataclass(frozen=True)
class Line:
    """One line of the table: what is changed, and whether its tokens must be those of the unchanged engine."""

    name: str
    changes: dict[str, object] = field(default_factory=dict)
    invariant: bool = True
    bfloat16: bool = False  # the fast path by itself: bfloat16 weights, free order
    asking: int = 0  # every which request asks for the fast path under rollback = request


PORTABLE = Line("portable")
FREE = Line("arithmetic free", {"arithmetic": "free"}, invariant=False)
FAST = Line("the fast path alone: bfloat16 weights, free", {"arithmetic": "free"}, invariant=False, bfloat16=True)
ROLLBACK = Line("rollback decoding, windows of 8", {"rollback": "all", "draft_length": 8})
LINES = {
    "1 request": (PORTABLE, FREE, FAST, ROLLBACK),
    "16 requests": (
        PORTABLE, FREE, FAST, ROLLBACK,
        Line("rollback decoding, windows of 4", {"rollback": "all", "draft_length": 4}),
        Line("rollback for every other request", {"rollback": "request", "draft_length": 8}, asking=2),
        Line("asynchronous scheduling", {"async_scheduling": True}),
        Line("pages of 8 tokens", {"page_size": 8}),
        Line("pages of 32 tokens", {"page_size": 32}),
        Line("no logprobs", {"observer": "none"}),
    ),
    "8 requests of repeating text": (
        PORTABLE,
        Line("drafts by lookup, fixed length 4", {"draft": "lookup"}),
        Line("drafts by lookup, variable length", {"draft": "lookup", "draft_policy": "variable"}),
        Line("drafts and asynchronous scheduling", {"draft": "lookup", "async_scheduling": True}),
        Line("drafts, arithmetic free, fixed length 4", {"draft": "lookup", "arithmetic": "free"}, invariant=False),
    ),
    "16 requests with a common beginning": (
        PORTABLE, Line("prefix cache, cold at first", {"prefix_cache": True}),
    ),
}  # fmt: skip


class Bench:
    """The model's weights, packed once for each arithmetic and page size."""

    def __init__(self, model: Model, threads: int) -> None:
        self.model = model
        self.kernels = load("auto", "auto")
        self.base = EngineConfig(
            arithmetic="portable", max_num_seqs=16, max_num_batched_tokens=4096, page_size=16, num_pages=POOL // 16,
            threads=threads, isa="auto", compiler="auto", tuning=0,
        )  # fmt: skip
        self.weights = cache(self._weights)
        self.arithmetic = cache(self._arithmetic)

    def open_engine(self, line: Line) -> Engine:
        """A fresh engine over arithmetics that stay."""
        config = replace(self.base, **line.changes)  # type: ignore[arg-type]
        config = replace(config, num_pages=POOL // config.page_size)
        target = self.arithmetic(config.arithmetic, config.page_size, line.bfloat16)
        fast = None
        if config.rollback != "off":
            path = self.arithmetic("free", config.page_size, True)
            path.pages = target.pages
            fast = FastPath(path, self.kernels, config)
        drafter = open_drafter(self.model, config, self.kernels)
        return Engine(self.model.config, config, target, self.kernels, str, drafter=drafter, fast=fast)

    def _weights(self, bfloat16: bool) -> tuple[Model, Weights]:
        model = in_bfloat16(self.model) if bfloat16 else self.model
        return model, pack_weights(model, self.kernels, self.base.threads)

    def _arithmetic(self, name: str, page_size: int, bfloat16: bool) -> KernelArithmetic:
        model, weights = self.weights(bfloat16)
        config = replace(self.base, arithmetic=name, page_size=page_size, num_pages=POOL // page_size)
        return KernelArithmetic(model, config, self.kernels, weights)


def prompts_of(workload: str, vocabulary: int) -> list[list[int]]:
    """Token ids without meaning."""

    def ids(salt: int, count: int) -> list[int]:
        return [3 + (7919 * (salt + 1) + 104_729 * j) % (vocabulary - 3) for j in range(count)]

    if workload == "1 request":
        return [ids(0, 64)]
    if workload == "16 requests":
        return [ids(i, 64) for i in range(16)]
    if workload == "8 requests of repeating text":
        return [ids(i, 8) * 8 for i in range(8)]
    return [ids(99, 256) + ids(i, 32) for i in range(16)]


def run(engine: Engine, prompts: list[list[int]], new: int, asking: int) -> tuple[float, list[Sequence]]:
    """(seconds, finished sequences); every other request draws with a seed, the first of all comes alone."""
    begun = time.perf_counter()
    sequences = []
    for i, prompt in enumerate(prompts):
        sampling = replace(SAMPLING, max_tokens=new, **({"temperature": 0.8, "seed": i} if i % 2 else {}))
        rollback = asking > 0 and i % asking == 0
        sequences.append(engine.submit(Request(id=str(i), prompt=tuple(prompt), sampling=sampling, rollback=rollback)))
        if not i:
            engine.step()
    while engine.has_work:
        engine.step()
    seconds = time.perf_counter() - begun
    if engine.ahead:
        engine.ahead.close()
    return seconds, sequences


def evidence(line: Line, engine: Engine, sequences: list[Sequence]) -> str:
    """What shows that the change was at work."""
    if line.changes.get("rollback") or line.changes.get("draft"):
        drafted, accepted = sum(s.drafted for s in sequences), sum(s.accepted for s in sequences)
        return f"{accepted} of {drafted} proposals taken, {sum(s.rollbacks for s in sequences)} rollbacks"
    if engine.ahead:
        return f"{engine.ahead.overlapped_steps} steps overlapped, {engine.ahead.overlap_ns / 1e6:.1f} ms in all"
    if engine.cache is not None:
        return f"{sum(s.cached_tokens for s in sequences)} tokens from the cache"
    return ""


@dataclass(frozen=True)
class Result:
    """One line as it was measured; `plain` are the seconds of the unchanged engine in the same rounds."""

    workload: str
    line: str
    seconds: list[float]
    plain: list[float]
    same: int  # new tokens that are those of the unchanged engine
    tokens: int
    evidence: str

    def row(self) -> list[str]:
        """Its line of the table."""
        rate = self.tokens / measured.quarters(self.seconds)[1]
        cost = measured.ratio(self.seconds, self.plain)
        return [self.workload, self.line, f"{rate:.1f}", cost, f"{self.same}/{self.tokens}", self.evidence]


def measure(bench: Bench, workload: str, lines: tuple[Line, ...], rounds: int, new: int) -> list[Result]:
    """Every line, `rounds` times, and a first time that warms up and is not counted."""
    prompts = prompts_of(workload, bench.model.config.vocab_size)
    seconds: dict[str, list[float]] = {line.name: [] for line in lines}
    notes: dict[str, str] = {}
    tokens: dict[str, list[list[int]]] = {}
    for number in range(rounds + 1):
        turn = number % len(lines)
        for line in (*lines[turn:], *lines[:turn]):
            engine = bench.open_engine(line)
            took, sequences = run(engine, prompts, new, line.asking)
            if number:
                seconds[line.name].append(took)
            notes[line.name] = evidence(line, engine, sequences)
            tokens[line.name] = [s.tokens[len(s.request.prompt) :] for s in sequences]
    plain = tokens[PORTABLE.name]
    changed = [line.name for line in lines if line.invariant and tokens[line.name] != plain]
    if changed:
        raise SystemExit(f"{workload}: {changed[0]}: other tokens than the unchanged engine")
    return [
        Result(
            workload, line.name, seconds[line.name], seconds[PORTABLE.name],
            sum(a == b for x, y in zip(tokens[line.name], plain, strict=True) for a, b in zip(x, y, strict=True)),
            len(prompts) * new, notes[line.name],
        )
        for line in lines
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--workload", action="append", choices=tuple(LINES), help="only this one; repeatable")
    parser.add_argument("--new", type=int, default=32, help="new tokens of each request")
    parser.add_argument("--out", type=Path, help="writes OUT.json and OUT.md")
    chosen = parser.parse_args()
    facts = {**measured.machine(), **measured.versions()}
    bench = Bench(open_source(chosen.model).model(), chosen.threads)
    results = []
    for workload, lines in LINES.items():
        if chosen.workload and workload not in chosen.workload:
            continue
        results += measure(bench, workload, lines, chosen.rounds, chosen.new)
        print(f"{workload}: done", flush=True)
    header = ["workload", "engine", "new tokens/s", "time against portable", "same tokens", "at work"]
    heading = (
        f"{measured.describe(facts)}; model {chosen.model}, {chosen.threads} threads, {chosen.new} new tokens a "
        f"request, prefill included; medians of {chosen.rounds} rounds."
    )
    page = heading + "\n\n" + measured.table(header, [result.row() for result in results])
    print("\n" + page)
    record = {"machine": facts, "model": chosen.model, "threads": chosen.threads, "rounds": chosen.rounds}
    measured.keep(chosen.out, {**record, "lines": [asdict(result) for result in results]}, page)


if __name__ == "__main__":
    main()
