"""A stand-in for SGLang's offline engine: the fields of Engine, generate and meta_info, on numbers made of hashes."""

import asyncio
import hashlib
import itertools
import struct
from types import SimpleNamespace

import numpy as np

VOCAB = 64
KNOWN = {"model_path", "skip_tokenizer_init", "enable_deterministic_inference", "dtype", "disable_cuda_graph",
         "disable_radix_cache", "max_running_requests", "mem_fraction_static", "tp_size", "random_seed", "log_level",
         "attention_backend", "context_length", "chunked_prefill_size", "page_size"}  # fmt: skip


def _logprobs(ids, taint):
    seed = hashlib.sha256(struct.pack(f"{len(ids)}i", *ids) + str(taint).encode()).digest()
    logits = np.random.default_rng(list(seed)).normal(size=VOCAB).astype(np.float32) * np.float32(2)
    return logits - np.float32(np.log(np.exp(logits.astype(np.float64)).sum()))


class Engine:
    def __init__(self, **kwargs):
        if set(kwargs) - KNOWN:
            raise TypeError(f"ServerArgs got {sorted(set(kwargs) - KNOWN)}")
        defaults = {"attention_backend": None, "sampling_backend": "flashinfer", "page_size": 1,
                    "chunked_prefill_size": 8192}  # fmt: skip
        told = self.told = SimpleNamespace(**{**defaults, **kwargs})
        self.server_args = SimpleNamespace(**kwargs, resolved_dict=lambda: vars(told))
        told.attention_backend = told.attention_backend or "fa3"
        if told.enable_deterministic_inference:
            told.sampling_backend = "pytorch"
            told.disable_radix_cache = told.disable_radix_cache or told.attention_backend == "flashinfer"
        self.loop = asyncio.new_event_loop()
        self.running, self.seen, self.aborted, self.lost = {}, set(), [], False
        self.noise = itertools.count()
        self.tokenizer_manager = SimpleNamespace(abort_request=self._abort)

    def _abort(self, rid="", abort_all=False):
        self.aborted.append(rid)
        self.running.pop(rid, None)

    def get_server_info(self):
        return {**vars(self.told), "version": "0.0.0", "internal_states": []}

    def flush_cache(self):
        self.seen = set()
        return SimpleNamespace(success=True)

    def shutdown(self):
        self.loop.close()

    def generate(self, **words):
        async def last():
            chunks = [chunk async for chunk in await self.async_generate(**words, rid="one", stream=True)]
            return chunks[-1]

        return self.loop.run_until_complete(last())

    async def async_generate(
        self, input_ids=None, sampling_params=None, return_logprob=False, top_logprobs_num=None, stream=False, rid=None
    ):
        return self._stream(list(input_ids), sampling_params, top_logprobs_num or 0, rid)

    async def _stream(self, prompt, params, top, rid):
        cached = 0
        if not self.told.disable_radix_cache and tuple(prompt) in self.seen:
            cached = len(prompt) - 1
        self.seen.add(tuple(prompt))
        self.running[rid] = prompt
        output, logprobs, tops = [], [], []
        while len(output) < params["max_new_tokens"]:
            await asyncio.sleep(0)
            row = _logprobs([*prompt, *output], "" if self.told.enable_deterministic_inference else len(self.running))
            token = int(np.argmax(row)) if params["temperature"] == 0 else self._draw(row, params, len(output))
            best = np.argsort(-row, kind="stable")[:top]
            output.append(token)
            logprobs.append((float(row[token]), token, None))
            tops.append([(float(row[one]), int(one), None) for one in best])
            finished = len(output) == params["max_new_tokens"]
            if finished:
                self.running.pop(rid, None)
                if self.lost:
                    return
            yield {
                "text": "", "output_ids": list(output),
                "meta_info": {
                    "id": rid, "prompt_tokens": len(prompt), "completion_tokens": len(output), "cached_tokens": cached,
                    "finish_reason": {"type": "length", "length": len(output)} if finished else None,
                    "output_token_logprobs": list(logprobs), "output_top_logprobs": list(tops) if top else None,
                },
            }  # fmt: skip

    def _draw(self, row, params, position):
        fixed = self.told.enable_deterministic_inference
        seed = params.get("sampling_seed", 42) if fixed else 10_000 + next(self.noise)
        return int(np.argmax(row / params["temperature"] + np.random.default_rng([seed, position]).gumbel(size=VOCAB)))
