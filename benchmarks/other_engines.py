"""Speed against other engines, float32 everywhere: `portable`, `free`, transformers eager, vLLM's CPU build, llama.cpp.

Run as

    python benchmarks/other_engines.py --model smollm2 --rounds 7 --cases decode-1,decode-16,prefill-512 \
        --vllm-python VENV/bin/python --llama-python VENV/bin/python --out FILE
    python benchmarks/other_engines.py --model smollm2 --rounds 3 --cases mixed-64 --vllm-python ... --llama-python ...

Each arm is a process of its own that waits while the others work (`other_engines_arm.py`), so that every round measures
all of them one after another; whoever begins changes from round to round. All arms generate greedily from the same
token ids, without logprobs, stops or a prefix cache, 16 sequences at a time. A decode figure is the time of 33 new
tokens less the time of 1, a prefill figure the time of 1. An arm that is not installed stands in the table with the
reason.

At batch 1 the floor is the memory: reading the weights once per token, as they are stored. That is measured in the same
rounds, with as many threads, over a buffer of that size; what is printed is how often longer a token takes.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ["OPENBLAS_NUM_THREADS"] = "1"  # before numpy: the memory is read by threads of our own
sys.path[0] = str(Path(__file__).resolve().parents[1])  # `benchmarks` is a package of the root

from benchmarks import measured, model_files  # noqa: E402
from engines.bundled.models.catalogue import open_source  # noqa: E402

ARMS = ("portable", "free", "transformers", "vllm", "llama.cpp")
SEATS = 16
DECODED = 32
DEADLINE = 900.0  # seconds an arm may take to start or to answer


@dataclass(frozen=True)
class Case:
    """Prompts of `lengths` tokens, `new[i]` new ones each; `less_first`: the time of one new token is taken off."""

    name: str
    unit: str
    lengths: tuple[int, ...]
    new: tuple[int, ...]
    less_first: bool = False

    @property
    def work(self) -> int:
        """Tokens that the figure is about: new ones, or prompt tokens where only one new one is asked for."""
        if self.less_first:
            return sum(self.new) - len(self.new)
        return sum(self.lengths) if set(self.new) == {1} else sum(self.new)


CASES = {
    "decode-1": Case("decode, batch 1", "tokens/s", (64,), (DECODED + 1,), True),
    "decode-16": Case("decode, batch 16", "tokens/s", (64,) * 16, (DECODED + 1,) * 16, True),
    "prefill-512": Case("prefill of 512", "prompt tokens/s", (512,), (1,)),
    "mixed-64": Case(
        "64 mixed requests", "new tokens/s", tuple(16 + 37 * i % 97 for i in range(64)),
        tuple(16 + 11 * i % 33 for i in range(64)),
    ),
}  # fmt: skip


@dataclass
class Arm:
    """An engine's process, or why there is none."""

    name: str
    missing: str = ""
    facts: dict[str, object] = field(default_factory=dict)
    process: subprocess.Popen[str] | None = None
    log: IO[str] | None = None

    def ask(self, line: str | None) -> dict[str, object]:
        """The answer to a line, or the first thing it says. Ends an arm that says nothing in DEADLINE."""
        assert self.process is not None
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        timer = threading.Timer(DEADLINE, self.process.kill)
        timer.start()
        try:
            if line is not None:
                self.process.stdin.write(line + "\n")
                self.process.stdin.flush()
            answer = self.process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        finally:
            timer.cancel()
        if not answer:
            return {"missing": f"ended: {self._last_words()}"}
        found: dict[str, object] = json.loads(answer)
        return found

    def close(self) -> None:
        if self.process is not None:
            assert self.process.stdin is not None
            self.process.stdin.close()
            try:
                self.process.wait(30)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()

    def _last_words(self) -> str:
        assert self.log is not None
        self.log.seek(0)
        lines = [line.strip() for line in self.log.read().splitlines() if line.strip()]
        return lines[-1][:200] if lines else "no output"


def open_arms(chosen: argparse.Namespace) -> list[Arm]:
    """Starts every arm asked for, one after another."""
    model, cache = open_source(chosen.model).model(), Path(chosen.cache)
    folder = str(model_files.write_folder(model, cache))
    gguf = model_files.write_gguf(chosen.model, cache)
    pythons = {"vllm": chosen.vllm_python, "llama.cpp": chosen.llama_python}
    arms = []
    for name in chosen.arms.split(","):
        if name not in ARMS:
            raise SystemExit(f"--arms: expected some of {', '.join(ARMS)}, got {name!r}")
        arm, python = Arm(name), pythons.get(name, sys.executable)
        path = folder if name in ("transformers", "vllm") else str(gguf) if name == "llama.cpp" else chosen.model
        if python is None:
            arm.missing = f"no --{name.split('.')[0]}-python given"
        elif name == "llama.cpp" and gguf is None:
            arm.missing = f"model {chosen.model} has no GGUF file"
        else:
            start(arm, [python, str(Path(__file__).with_name("other_engines_arm.py")), name, path], chosen.threads)
        arms.append(arm)
        print(f"{name}: {arm.missing or measured.describe({k: str(v) for k, v in arm.facts.items()})}", flush=True)
    return arms


def start(arm: Arm, command: list[str], threads: int) -> None:
    """Runs the arm's process and takes its first line."""
    arm.log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - open as long as the arm
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    del environment["OPENBLAS_NUM_THREADS"]
    try:
        arm.process = subprocess.Popen(
            [*command, str(threads), str(SEATS)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=arm.log,
            text=True, env=environment,
        )  # fmt: skip
    except OSError as error:
        arm.missing = f"{command[0]}: {error.strerror}"
        return
    first = arm.ask(None)
    arm.missing = str(first.get("missing", ""))
    ready = first.get("ready", {})
    assert isinstance(ready, dict)
    arm.facts = ready


def prompts_of(case: Case, vocabulary: int) -> list[list[int]]:
    """Ids without meaning, the same for every arm."""
    return [
        [3 + (7919 * (i + 1) + 104_729 * j) % (vocabulary - 3) for j in range(n)] for i, n in enumerate(case.lengths)
    ]


def measure(arm: Arm, case: Case, prompts: list[list[int]]) -> tuple[float, list[list[int]]]:
    """(seconds, new tokens) of the case; an arm that ends on the way is missing from then on."""
    answer = arm.ask(json.dumps({"prompts": prompts, "new": case.new}))
    first = arm.ask(json.dumps({"prompts": prompts, "new": [1] * len(prompts)})) if case.less_first else {"seconds": 0}
    for one in (answer, first):
        if "missing" in one:
            arm.missing = str(one["missing"])
            return 0.0, []
    tokens = answer["tokens"]
    assert isinstance(tokens, list)
    lengths = [len(row) for row in tokens]
    if lengths != list(case.new):
        raise SystemExit(f"{arm.name}: {case.name}: asked for {list(case.new)} new tokens, got {lengths}")
    return float(str(answer["seconds"])) - float(str(first["seconds"])), tokens


def agreement(tokens: list[list[int]], ours: list[list[int]]) -> str:
    """How many new tokens of how many are the first arm's, row by row up to the first that differs."""
    same = 0
    for mine, theirs in zip(tokens, ours, strict=True):
        pairs = list(zip(mine, theirs, strict=True))
        same += next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))
    return f"{same}/{sum(map(len, ours))}"


@dataclass
class Result:
    """Seconds of each arm in each round of one case, and how far each follows the first arm's tokens."""

    case: Case
    seconds: dict[str, list[float]] = field(default_factory=dict)
    same: dict[str, str] = field(default_factory=dict)


def run_case(case: Case, arms: list[Arm], rounds: int, vocabulary: int, memory: measured.Memory | None) -> Result:
    """All arms, `rounds` times, and a first time that warms up and is not counted."""
    result, prompts = Result(case), prompts_of(case, vocabulary)
    tokens: dict[str, list[list[int]]] = {}
    for number in range(rounds + 1):
        turn = number % len(arms)
        for arm in arms[turn:] + arms[:turn]:
            if arm.missing:
                continue
            seconds, tokens[arm.name] = measure(arm, case, prompts)
            if number and not arm.missing:
                result.seconds.setdefault(arm.name, []).append(seconds)
        if memory and number:
            result.seconds.setdefault("memory", []).append(min(memory.read() for _ in range(3)))
    first = next(arm.name for arm in arms if not arm.missing)
    for arm in arms:
        if arm.missing:
            result.seconds.pop(arm.name, None)
        else:
            result.same[arm.name] = agreement(tokens[arm.name], tokens[first])
    print(f"{case.name}: done", flush=True)
    return result


def page_of(results: list[Result], arms: list[Arm], facts: str) -> str:
    """The table: rates, and how much longer each arm takes than the first."""
    first = next(arm.name for arm in arms if not arm.missing)
    rows = []
    for result in results:
        for arm in arms:
            if arm.missing or arm.name not in result.seconds:
                rows.append([result.case.name, arm.name, f"not run: {arm.missing}", "-", "-"])
                continue
            median = measured.quarters(result.seconds[arm.name])[1]
            rows.append([
                result.case.name, arm.name, f"{result.case.work / median:.1f} {result.case.unit}",
                measured.ratio(result.seconds[arm.name], result.seconds[first]), result.same[arm.name],
            ])  # fmt: skip
    header = ["case", "engine", "rate", f"time against {first}", f"tokens as {first}"]
    return "\n\n".join([facts, measured.table(header, rows), *memory_lines(results, arms)])


def memory_lines(results: list[Result], arms: list[Arm]) -> list[str]:
    """How far a token at batch 1 is from reading the weights once."""
    lines = []
    for result in results:
        if "memory" not in result.seconds:
            continue
        ours = next(arm for arm in arms if arm.name == "portable")
        stored, whole = int(str(ours.facts["stored_bytes"])), int(str(ours.facts["float32_bytes"]))
        read = measured.quarters(result.seconds["memory"])[1]
        token = measured.quarters(result.seconds["portable"])[1] / result.case.work
        as_float = read * whole / stored
        lines.append(
            f"Memory: {stored / read / 1e9:.1f} GB/s. The matrices as stored ({stored / 1e6:.0f} MB) are read in "
            f"{read * 1e3:.2f} ms, as float32 ({whole / 1e6:.0f} MB) in {as_float * 1e3:.2f} ms; a token of `portable` "
            f"at batch 1 takes {token * 1e3:.2f} ms: {token / read:.2f} times the limit as stored, "
            f"{token / as_float:.2f} times that of float32 (the aim: within 1.3)."
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cases", default=",".join(CASES), help=f"some of {', '.join(CASES)}")
    parser.add_argument("--arms", default=",".join(ARMS), help=f"some of {', '.join(ARMS)}, the first is compared with")
    parser.add_argument("--vllm-python", help="a Python that has vllm")
    parser.add_argument("--llama-python", help="a Python that has llama-cpp-python")
    parser.add_argument("--cache", default=".samebits/benchmarks", help="where converted model files are kept")
    parser.add_argument("--out", type=Path, help="writes OUT.json and OUT.md")
    chosen = parser.parse_args()
    unknown = [name for name in chosen.cases.split(",") if name not in CASES]
    if unknown:
        raise SystemExit(f"--cases: expected some of {', '.join(CASES)}, got {unknown[0]!r}")
    facts = {**measured.machine(), **measured.versions()}
    arms = open_arms(chosen)
    results: list[Result] = []  # filled as each case ends, so that an interrupted run still shows what it has
    try:
        if all(arm.missing for arm in arms):
            raise SystemExit("no arm could be started")
        ours = next((arm for arm in arms if arm.name == "portable" and not arm.missing), None)
        memory = measured.Memory(int(str(ours.facts["stored_bytes"])), chosen.threads) if ours else None
        vocabulary = open_source(chosen.model).config().vocab_size
        results.extend(
            run_case(CASES[name], arms, chosen.rounds, vocabulary, memory if name == "decode-1" else None)
            for name in chosen.cases.split(",")
        )
    except KeyboardInterrupt:
        if not results:
            raise
        print("interrupted; what was measured until then:")
    finally:
        for arm in arms:
            arm.close()
    said = [f"{arm.name}: {measured.describe({k: str(v) for k, v in arm.facts.items()})}" for arm in arms if arm.facts]
    heading = f"{measured.describe(facts)}; model {chosen.model}, float32, {chosen.threads} threads, "
    page = page_of(results, arms, "\n".join([heading + f"medians of {chosen.rounds} rounds.", *said]))
    print("\n" + page)
    measured.keep(chosen.out, {
        "machine": facts, "model": chosen.model, "threads": chosen.threads, "rounds": chosen.rounds,
        "arms": {arm.name: {"missing": arm.missing, **arm.facts} for arm in arms},
        "cases": [
            {"case": r.case.name, "unit": r.case.unit, "work": r.case.work, "seconds": r.seconds, "same": r.same}
            for r in results
        ],
    }, page)  # fmt: skip


if __name__ == "__main__":
    main()
