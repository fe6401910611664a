"""One vLLM arm of gpu_tensorcore.py in a process of its own: the same workloads and sections as gpu_arm.py, as JSON.

vLLM runs as it comes (its own processes, prefix cache and asynchronous scheduling on), with the seats and step tokens
of our arms and random weights, in its batch-invariant mode or not. Rules: the mode is set before vLLM is imported; OUT
is written after every section; an arm whose kernels are not those of its mode ends with an error.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from gpu_model import SMOLLM2
from gpu_workloads import (
    QWEN3_8B,
    ROWS,
    SEATS,
    STEP_TOKENS,
    census,
    census_figures,
    random_prompt,
    row_figures,
    single_figures,
)

from engines.bundled.config import ModelConfig
from engines.vllm_config import EXTENSION, RANDOM_WEIGHTS

START = time.monotonic()
ROOT = Path(__file__).resolve().parents[1]
SHAPES = {"8b": QWEN3_8B, "smollm2": SMOLLM2}
SECTIONS = ("rows", "single", "census")
CONTEXT = 4096  # at most; the longest request has 1,153 tokens
MODEL_TYPES = {"Qwen3ForCausalLM": "qwen3", "LlamaForCausalLM": "llama"}
Results = dict[str, object]
Prompts = Sequence[list[int]]


def say(*words: object) -> None:
    print(f"[{time.monotonic() - START:6.1f}]", *words, flush=True)


def set_environment(*, invariant: bool) -> None:
    """Variables of vLLM's processes. Its workers import the project's loader of random weights by name."""
    paths = [str(ROOT), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    os.environ["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    os.environ["VLLM_BATCH_INVARIANT"] = str(int(invariant))
    if importlib.util.find_spec("flashinfer") is None:
        os.environ["VLLM_USE_FLASHINFER_SAMPLER"] = "0"  # on by default, and ends the start where it is missing
    for name, value in {
        "DO_NOT_TRACK": "1", "GLOO_SOCKET_IFNAME": "lo", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false", "VLLM_HOST_IP": "127.0.0.1", "VLLM_NO_USAGE_STATS": "1",
    }.items():  # fmt: skip
        os.environ.setdefault(name, value)


def write_config(config: ModelConfig, folder: Path) -> None:
    """config.json of the shape, as Hugging Face writes it."""
    (folder / "config.json").write_text(json.dumps({
        "architectures": [config.architecture], "model_type": MODEL_TYPES[config.architecture],
        "hidden_size": config.hidden_size, "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_hidden_layers, "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads, "head_dim": config.head_dim,
        "vocab_size": config.vocab_size, "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.rms_norm_eps, "rope_theta": config.rope_theta, "hidden_act": "silu",
        "tie_word_embeddings": config.tie_word_embeddings, "attention_bias": False, "attention_dropout": 0.0,
        "torch_dtype": "bfloat16", "bos_token_id": config.bos_token_id, "eos_token_id": config.eos_token_ids[0],
    }))  # fmt: skip


class Vllm:
    """A started vLLM and greedy requests of ids on it."""

    def __init__(self, config: ModelConfig) -> None:
        from vllm import LLM, SamplingParams

        self.config, self._params = config, SamplingParams
        self._folder = tempfile.TemporaryDirectory(prefix="gpu-vllm-")
        write_config(config, Path(self._folder.name))
        self.llm: Any = LLM(
            model=self._folder.name, skip_tokenizer_init=True, load_format=RANDOM_WEIGHTS, dtype="bfloat16", seed=0,
            worker_extension_cls=EXTENSION, max_model_len=min(CONTEXT, config.max_position_embeddings),
            max_num_seqs=SEATS, max_num_batched_tokens=STEP_TOKENS, gpu_memory_utilization=0.85,
            disable_log_stats=False,
        )  # fmt: skip

    def generate(self, prompts: Prompts, new: int | Sequence[int]) -> tuple[list[list[int]], float]:
        """Token ids that each prompt got, and the seconds of the call."""
        lengths = [new] * len(prompts) if isinstance(new, int) else list(new)
        params = [self._params(temperature=0, max_tokens=length, ignore_eos=True, detokenize=False)
                  for length in lengths]  # fmt: skip
        asked = [{"prompt_token_ids": prompt} for prompt in prompts]
        begin = time.perf_counter()
        answers = self.llm.generate(asked, params, use_tqdm=False)
        seconds = time.perf_counter() - begin
        return [list(answer.outputs[0].token_ids) for answer in answers], seconds

    def random(self, draw: random.Random, count: int, prompt: int, new: int) -> float:
        """Seconds for so many random prompts."""
        return self.generate([random_prompt(draw, self.config, prompt) for _ in range(count)], new)[1]

    def facts(self) -> Results:
        """What vLLM settled on, as its configuration and its worker say."""
        config = self.llm.llm_engine.vllm_config
        compilation = config.compilation_config
        observed = self.llm.collective_rpc("samebits_observe")[0]
        return {
            "compile mode": str(compilation.mode), "graph mode": str(compilation.cudagraph_mode),
            "async scheduling": config.scheduler_config.async_scheduling,
            "prefix cache": config.cache_config.enable_prefix_caching,
            "max_num_batched_tokens": config.scheduler_config.max_num_batched_tokens, **observed,
        }  # fmt: skip


def measure_rows(engine: Vllm, repeats: int) -> Results:
    """As gpu_arm.py measures them, with at most so many timed repeats."""
    draw, found = random.Random(1), {}
    for row in ROWS:
        count = min(repeats, row.repeats)
        times = [engine.random(draw, row.requests, row.prompt, row.new) for _ in range(count + 1)]
        found[row.name] = row_figures(row, times)
        say(row.name, found[row.name])
    return dict(found)


def measure_single(engine: Vllm, repeats: int) -> Results:
    """One sequence: milliseconds to its first token and from token to token."""
    draw, found = random.Random(1), {}
    for prompt in (128, 1024):
        first = [engine.random(draw, 1, prompt, 1) for _ in range(12)]
        whole = [engine.random(draw, 1, prompt, 129) for _ in range(repeats)]
        between = [(seconds - statistics.median(first)) / 128 for seconds in whole]
        found[str(prompt)] = single_figures(first, between)
        say("one sequence", prompt, found[str(prompt)])
    return dict(found)


def count_distinct(engine: Vllm, copies: int, new: int) -> Results:
    """Copies of one prompt among companions: how many completions there are, and where they part."""
    work = census(engine.config, copies, new)
    answers, seconds = engine.generate([prompt for _, prompt, _ in work], [tokens for _, _, tokens in work])
    outs = [out for (is_copy, _, _), out in zip(work, answers, strict=True) if is_copy]
    engine.llm.reset_prefix_cache()
    alone, _ = engine.generate([next(prompt for is_copy, prompt, _ in work if is_copy)], new)
    found: Results = {
        **census_figures(outs, alone[0], new),
        "output tokens/s": sum(map(len, answers)) / seconds, "s": seconds,
    }  # fmt: skip
    say("census", found)
    return found


def check_mode(facts: Results, *, invariant: bool) -> str:
    """Why the arm is not what its name says, or nothing."""
    installed = facts["batch_invariant_kernels"]
    return "" if installed is invariant else f"batch-invariant kernels: expected {invariant}, found {installed}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mode", choices=("ordinary", "invariant"), required=True)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="8b")
    parser.add_argument("--sections", default="rows,single,census")
    parser.add_argument("--repeats", type=int, default=2, help="timed repeats of a row and of one sequence, at most")
    parser.add_argument("--copies", type=int, default=1000)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    chosen = options.sections.split(",")
    if unknown := sorted(set(chosen) - set(SECTIONS)):
        parser.error(f"--sections: there is no {unknown[0]!r}; there are {', '.join(SECTIONS)}")
    set_environment(invariant=options.mode == "invariant")
    engine = Vllm(SHAPES[options.shape])
    results: Results = {"versions": versions(), "start s": time.monotonic() - START}
    say("opened", results)
    engine.random(random.Random(0), 4, 20, 8)
    sections: dict[str, Callable[[], Results]] = {
        "rows": lambda: measure_rows(engine, options.repeats),
        "single": lambda: measure_single(engine, options.repeats),
        "census": lambda: count_distinct(engine, options.copies, 128),
    }
    for name in chosen:
        results[name] = sections[name]()
        options.out.write_text(json.dumps(results, indent=1, default=str))
    facts = engine.facts()
    results["facts"] = facts
    options.out.write_text(json.dumps(results, indent=1, default=str))
    say("facts", facts)
    engine.llm.llm_engine.engine_core.shutdown()
    wrong = check_mode(facts, invariant=options.mode == "invariant")
    if wrong:
        say(wrong)
    return int(bool(wrong))


def versions() -> dict[str, str]:
    """What computes here."""
    from importlib.metadata import version

    return {name: version(name) for name in ("vllm", "torch", "triton", "transformers")}


if __name__ == "__main__":
    sys.exit(main())
