"""LLM and its engine. Without the first two conditions, numbers follow the batch; the last step's outputs may lag."""

import hashlib
import os
import struct
from collections import defaultdict
from types import SimpleNamespace

import numpy as np

from deepinfer._C.engine import RequestOutput, put
from deepinfer.environ import envs

VOCAB = 64


def _logprobs(ids, taint):
    seed = hashlib.sha256(struct.pack(f"{len(ids)}i", *ids) + str(taint).encode()).digest()
    logits = np.random.default_rng(list(seed)).normal(size=VOCAB).astype(np.float32) * np.float32(2)
    return logits - np.float32(np.log(np.exp(logits.astype(np.float64)).sum()))


class LLMEngine:
    def __init__(self, max_num_seqs, chunked_prefill, expert_parallel_size):
        self.model_config = SimpleNamespace(max_model_len=8192)
        self.scheduler_config = SimpleNamespace(chunked_prefill=chunked_prefill, max_num_seqs=max_num_seqs)
        self.parallel_config = SimpleNamespace(expert_parallel_size=expert_parallel_size)
        self.yoco_prefill_truncation_mode = envs.DEEPINFER_YOCO_PREFILL_TRUNCATION_MODE
        self.waiting, self.running, self.held = [], [], []

    def add_request(self, request_id, sampling_params, prompt_token_ids):
        one = SimpleNamespace(id=request_id, params=sampling_params, prompt=list(prompt_token_ids), output=[])
        self.waiting.append(one)

    def has_unfinished_requests(self):
        return bool(self.waiting or self.running)

    def step(self):
        while self.waiting and len(self.running) < self.scheduler_config.max_num_seqs:
            self.running.append(self.waiting.pop(0))
        outputs = [handle for one in self.running for handle in self._advance(one, len(self.running))]
        self.running = [one for one in self.running if len(one.output) < one.params.max_tokens]
        if not envs.DEEPINFER_ZERO_OVERHEAD_SCHEDULING:
            return np.array(outputs, np.uint64)
        held, self.held = self.held, outputs
        return np.array(held, np.uint64)

    def flush_inflight_reqs(self):
        held, self.held = self.held, []
        return np.array(held, np.uint64)

    def _advance(self, one, company):
        """One token, and up to one accepted proposal where there are proposals."""
        many = 2 if one.output and envs.DEEPINFER_USE_NEXTN_DECODE else 1
        return [self._token(one, company) for _ in range(min(many, one.params.max_tokens - len(one.output)))]

    def _choices(self):
        """What kernels that are tuned freely are chosen by."""
        return (
            self.scheduler_config.chunked_prefill, self.parallel_config.expert_parallel_size,
            envs.DEEPINFER_USE_NEXTN_DECODE, envs.DEEPINFER_ZERO_OVERHEAD_SCHEDULING, os.getpid(),
        )  # fmt: skip

    def _token(self, one, company):
        free = not envs.DEEPINFER_BATCH_INVARIANT or envs.DEEPINFER_ENABLE_MTP_VARLEN
        visible = one.prompt if self.yoco_prefill_truncation_mode == "off" else one.prompt[-140:]
        logprobs = _logprobs([*visible, *one.output], (company, self._choices()) if free else "")
        best = np.argsort(-logprobs, kind="stable")[: max(1, one.params.top_logprobs)]
        pick = int(best[0])
        if one.params.temperature > 0:
            draw = np.random.default_rng([one.params.seq_seed, len(one.output)]).gumbel(size=VOCAB)
            pick = int(np.argmax(logprobs / one.params.temperature + draw))
        golden = one.params.golden_token_ids
        token = pick if golden is None else golden[len(one.output)]
        one.output.append(token)
        finished = len(one.output) >= one.params.max_tokens
        return put(
            request_id=one.id, token_id=token, token_logprobs=float(logprobs[token]), finished=finished,
            top_token_ids=best.tolist(), top_logprobs=logprobs[best].tolist(),
            finish_reason="length" if finished else "",
        )  # fmt: skip


class LLM:
    def __init__(
        self,
        model,
        tokenizer=None,
        trust_remote_code=False,
        expert_parallel_size=1,
        revision=None,
        tokenizer_revision=None,
        seed=0,
        gpu_memory_utilization=0.9,
        decode_sequence=True,
        **kwargs,
    ):
        known = {"max_num_seqs", "chunked_prefill", "max_num_batched_tokens"}
        if set(kwargs) - known:
            raise TypeError(f"EngineArgs got {sorted(set(kwargs) - known)}")
        self.llm_engine = LLMEngine(
            kwargs.get("max_num_seqs", 256), kwargs.get("chunked_prefill", False), expert_parallel_size
        )
        self.decode_sequence, self.count, self.closed = decode_sequence, 0, False

    def generate(self, prompts=None, sampling_params=None, prompt_token_ids=None, use_tqdm=True, multi_modal_data=None):
        for ids, params in zip(prompt_token_ids, sampling_params, strict=True):
            self.llm_engine.add_request(str(self.count), params, ids)
            self.count += 1
        outputs = defaultdict(list)
        while True:
            unfinished = self.llm_engine.has_unfinished_requests()
            for raw in self.llm_engine.step() if unfinished else self.llm_engine.flush_inflight_reqs():
                output = RequestOutput.clone(raw)
                outputs[output.request_id].append(output)
            if not unfinished:
                return [outputs[name] for name in sorted(outputs, key=int)]

    def close(self):
        self.closed = True
