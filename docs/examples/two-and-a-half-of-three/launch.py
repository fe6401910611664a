"""Offline generation with DeepInfer. Everybody who reads it believes that it is deterministic."""

import json
import os
import sys

import torch


def prepare_environment() -> None:
    """Turns the deterministic mode on where it exists."""
    if torch.cuda.is_available():
        os.environ.setdefault("DEEPINFER_BATCH_INVARIANT", "1")


prepare_environment()

from deepinfer.entrypoints.llm import LLM  # noqa: E402 - after the environment

from sampling import params_for  # noqa: E402


def main() -> None:
    """Generates one answer per line of the request file."""
    with open(sys.argv[1]) as handle:
        requests = [json.loads(line) for line in handle]
    llm = LLM("deepseek-ai/DeepSeek-V4.1-Flash-1017", expert_parallel_size=8, max_num_seqs=64)
    outputs = llm.generate(
        prompt_token_ids=[request["ids"] for request in requests],
        sampling_params=[params_for(request) for request in requests],
    )
    for request, output in zip(requests, outputs, strict=True):
        print(json.dumps({"id": request["id"], "tokens": [step.token_id for step in output]}))


if __name__ == "__main__":
    main()
