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
    """`taint` moves the last bits alone, as another order of sums does."""
    text = struct.pack(f"{len(ids)}i", *ids)
    logits = _normal(text) * np.float32(2)
    if taint:
        logits += _normal(text + str(taint).encode()) * np.float32(1e-5)
    return logits - np.float32(np.log(np.exp(logits.astype(np.float64)).sum()))


def _normal(text):
    seed = hashlib.sha256(text).digest()
    return np.random.default_rng(list(seed)).normal(size=VOCAB).astype(np.float32)


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
        self.seats = asyncio.Semaphore(told.max_running_requests)
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
        self, input_ids=None, sampling_params=None, return_logprob=False, logprob_start_len=None,
        top_logprobs_num=None, stream=False, rid=None,
    ):  # fmt: skip
        if not stream:
            return self._score(list(input_ids), logprob_start_len, top_logprobs_num or 0, rid)
        return self._stream(list(input_ids), sampling_params, top_logprobs_num or 0, rid)

    def _score(self, text, start, top, rid):
        """Logprobs of text[start:], the first of which is padding; a prompt has another shape than tokens."""
        taint = "" if self.told.enable_deterministic_inference else "prefill"
        own, tops = [(None, text[start], None)], [None]
        for i in range(start + 1, len(text)):
            row = _logprobs(text[:i], taint)
            own.append((float(row[text[i]]), text[i], None))
            tops.append([(float(row[one]), int(one), None) for one in np.argsort(-row, kind="stable")[:top]])
        meta = {"id": rid, "prompt_tokens": len(text), "completion_tokens": 1, "cached_tokens": 0,
                "input_token_logprobs": own, "input_top_logprobs": tops}  # fmt: skip
        return {"text": "", "meta_info": meta}

    async def _stream(self, prompt, params, top, rid):
        async with self.seats:
            async for chunk in self._answer(prompt, params, top, rid):
                yield chunk

    def _cached(self, prompt):
        """Tokens of the longest prefix that some prompt before had, but not all of this one."""
        if self.told.disable_radix_cache:
            return 0
        shared = [sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(prompt, old, strict=False)))
                  for old in self.seen]  # fmt: skip
        return min(max(shared, default=0), len(prompt) - 1)

    async def _answer(self, prompt, params, top, rid):
        cached = self._cached(prompt)
        self.seen.add(tuple(prompt))
        self.running[rid] = prompt
        output, logprobs, tops = [], [], []
        while len(output) < params["max_new_tokens"]:
            await asyncio.sleep(0)
            fixed = self.told.enable_deterministic_inference
            row = _logprobs([*prompt, *output], "" if fixed else (len(self.running), cached > 0))
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
