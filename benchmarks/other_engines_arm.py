"""One arm of `benchmarks/other_engines.py`: an engine in a process of its own, driven by lines of JSON.

Run by that script as `python benchmarks/other_engines_arm.py ARM MODEL THREADS SEATS`. The first line it writes says
whether it is ready, or why it is not; then each line it reads, {"prompts": [[ids]], "new": [counts]}, is generated
greedily to the end, and answered with {"seconds": ..., "tokens": [[ids]]}. It imports nothing but the standard library
until it knows which engine it is, since that one has its own Python. While it waits for a line it uses no processor.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])  # `benchmarks` is a package of the root

Generate = Callable[[list[list[int]], list[int]], list[list[int]]]
MOST_TOKENS = 4096  # prefilled in one step
LONGEST = 2048  # tokens of prompt and output


def open_ours(arithmetic: str, model: str, threads: int, seats: int) -> tuple[Generate, dict[str, object]]:
    """The bundled engine; nobody asks for logprobs, as nobody asks the other engines for them."""
    from engines.bundled.arithmetic.portable import KernelArithmetic
    from engines.bundled.arithmetic.weights import matrices, pack_weights, storage
    from engines.bundled.config import EngineConfig
    from engines.bundled.engine import Engine
    from engines.bundled.kernels.library import load
    from engines.bundled.models.catalogue import open_source
    from engines.bundled.request import Request, Sampling

    loaded, page = open_source(model).model(), 16
    config = EngineConfig(
        arithmetic=arithmetic, max_num_seqs=seats, max_num_batched_tokens=MOST_TOKENS, page_size=page,
        num_pages=seats * LONGEST // page, threads=threads, isa="auto", compiler="auto", tuning=0, observer="none",
    )  # fmt: skip
    kernels = load(config.isa, config.compiler)
    weights = pack_weights(loaded, kernels, threads)
    engine = Engine(loaded.config, config, KernelArithmetic(loaded, config, kernels, weights), kernels, str)

    def generate(prompts: list[list[int]], new: list[int]) -> list[list[int]]:
        engine.reset()
        sequences = [
            engine.submit(
                Request(id=str(i), prompt=tuple(prompt), sampling=Sampling(
                    temperature=0.0, top_p=1.0, top_k=0, min_p=0.0, repetition_penalty=1.0, frequency_penalty=0.0,
                    presence_penalty=0.0, seed=None, max_tokens=count, min_tokens=0, ignore_eos=True, stop=(),
                    stop_token_ids=(), logit_bias=(), logprobs=0,
                ))
            )
            for i, (prompt, count) in enumerate(zip(prompts, new, strict=True))
        ]  # fmt: skip
        while engine.has_work:
            engine.step()
        return [sequence.tokens[len(sequence.request.prompt) :] for sequence in sequences]

    packed = list(matrices(weights))
    return generate, {
        "stored_bytes": sum(matrix.data.nbytes + matrix.scales.nbytes for matrix in packed),
        "float32_bytes": 4 * sum(matrix.rows * matrix.columns for matrix in packed),
        "weights": storage(packed), "isa": kernels.isa, "compiler": kernels.compiler,
    }  # fmt: skip


def open_transformers(folder: str, threads: int, seats: int) -> tuple[Generate, dict[str, object]]:
    """`generate` of transformers with eager attention, in batches of `seats`, padded on the left."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(threads)
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32).eval()
    model.generation_config.pad_token_id = 0

    def generate(prompts: list[list[int]], new: list[int]) -> list[list[int]]:
        answers: list[list[int]] = []
        for begin in range(0, len(prompts), seats):
            group, counts = prompts[begin : begin + seats], new[begin : begin + seats]
            width = max(map(len, group))
            ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in group])
            mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in group])
            with torch.inference_mode():
                out = model.generate(
                    ids, attention_mask=mask, do_sample=False, max_new_tokens=max(counts), min_new_tokens=max(counts)
                )
            answers += [row[width : width + count].tolist() for row, count in zip(out, counts, strict=True)]
        return answers

    return generate, {"torch": str(torch.__version__), "transformers": metadata.version("transformers")}


def open_vllm(folder: str, threads: int, seats: int) -> tuple[Generate, dict[str, object]]:
    """vLLM's CPU build, in this process, prefix cache off."""
    os.environ.update(
        VLLM_CPU_KVCACHE_SPACE="1", VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_LOGGING_LEVEL="WARNING",
        VLLM_NO_USAGE_STATS="1", DO_NOT_TRACK="1", HF_HUB_OFFLINE="1", OMP_NUM_THREADS=str(threads),
    )  # fmt: skip
    import vllm

    llm = vllm.LLM(
        model=folder, dtype="float32", max_model_len=LONGEST, enforce_eager=True, max_num_seqs=seats,
        max_num_batched_tokens=MOST_TOKENS, enable_prefix_caching=False, skip_tokenizer_init=True,
    )  # fmt: skip

    def generate(prompts: list[list[int]], new: list[int]) -> list[list[int]]:
        params = [vllm.SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True, detokenize=False) for n in new]
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    return generate, {"vllm": vllm.__version__}


def open_llama_cpp(path: str, threads: int, seats: int) -> tuple[Generate, dict[str, object]]:
    """llama.cpp through llama-cpp-python's low-level calls: keys and values in float32, `seats` slots kept filled."""
    import llama_cpp as llama
    import numpy as np

    llama.llama_backend_init()
    shape = llama.llama_model_default_params()
    shape.n_gpu_layers = 0
    model = llama.llama_model_load_from_file(path.encode(), shape)
    options = llama.llama_context_default_params()
    options.n_ctx, options.n_seq_max, options.n_batch, options.n_ubatch = seats * LONGEST, seats, MOST_TOKENS, 512
    options.n_threads = options.n_threads_batch = threads
    options.type_k = options.type_v = 0  # float32
    options.kv_unified = True
    context = llama.llama_init_from_model(model, options)
    vocabulary = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(model))
    memory, batch = llama.llama_get_memory(context), llama.llama_batch_init(MOST_TOKENS, 0, 1)

    def run(rows: list[tuple[int, int, int, bool]]) -> list[int]:
        """One step over (token, position, slot, wanted); the greedy token of each wanted row."""
        batch.n_tokens = len(rows)
        for i, (token, position, slot, wanted) in enumerate(rows):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = token, position, 1, wanted
            batch.seq_id[i][0] = slot
        code = llama.llama_decode(context, batch)
        if code:
            raise RuntimeError(f"llama_decode returned {code}")
        return [
            int(np.ctypeslib.as_array(llama.llama_get_logits_ith(context, i), (vocabulary,)).argmax())
            for i, row in enumerate(rows)
            if row[3]
        ]

    def generate(prompts: list[list[int]], new: list[int]) -> list[list[int]]:
        llama.llama_memory_clear(memory, True)
        waiting, running, answers = list(range(len(prompts))), {}, [[] for _ in prompts]
        while waiting or running:
            rows = [(answers[i][-1], len(prompts[i]) + len(answers[i]) - 1, s, True) for s, i in running.items()]
            for slot in (s for s in range(seats) if s not in running):
                if not waiting or len(rows) + len(prompts[waiting[0]]) > MOST_TOKENS:
                    break
                prompt = prompts[waiting[0]]
                running[slot] = waiting.pop(0)
                rows += [(token, at, slot, at == len(prompt) - 1) for at, token in enumerate(prompt)]
            slots = [row[2] for row in rows if row[3]]
            for slot, token in zip(slots, run(rows), strict=True):
                answers[running[slot]].append(token)
                if len(answers[running[slot]]) == new[running[slot]]:
                    llama.llama_memory_seq_rm(memory, slot, -1, -1)
                    del running[slot]
        return answers

    return generate, {"llama-cpp-python": llama.__version__}


def main() -> None:
    """Opens the arm and answers lines until there are none."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever an engine prints goes to the log
    arm, model, threads, seats = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    try:
        if arm in ("portable", "free"):
            generate, facts = open_ours(arm, model, threads, seats)
        else:
            openers = {"transformers": open_transformers, "vllm": open_vllm, "llama.cpp": open_llama_cpp}
            generate, facts = openers[arm](model, threads, seats)
    except ImportError as error:
        print(json.dumps({"missing": f"{error} in {sys.executable}"}), file=answers)
        return
    print(json.dumps({"ready": facts}), file=answers)
    for line in sys.stdin:
        order = json.loads(line)
        begun = time.perf_counter()
        tokens = generate(order["prompts"], order["new"])
        print(json.dumps({"seconds": time.perf_counter() - begun, "tokens": tokens}), file=answers)


if __name__ == "__main__":
    main()
