"""SamplingParams with DeepInfer's fields and defaults."""

import random


class SamplingParams:
    def __init__(
        self,
        temperature=1.0,
        top_p=1.0,
        top_k=-1,
        ignore_eos=False,
        max_tokens=16,
        logprobs=False,
        prompt_logprobs=False,
        top_logprobs=0,
        first_n_token_no_eos=0,
        eos_id=0,
        so_args=None,
        golden_token_ids=None,
        seq_seed=None,
    ):
        if not 0.0 < top_p <= 1.0 or top_k < -1 or top_k == 0 or max_tokens < 1:
            raise ValueError((top_p, top_k, max_tokens))
        self.temperature, self.ignore_eos, self.max_tokens = temperature, ignore_eos, max_tokens
        self.top_logprobs, self.golden_token_ids = top_logprobs, golden_token_ids
        self.seq_seed = random.getrandbits(64) if seq_seed is None else seq_seed & 0xFFFF_FFFF_FFFF_FFFF
