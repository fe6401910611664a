"""Prints at how many of 700 queries vLLM's CPU attention differs between prefill and decode: as it comes, and cut.

A process of its own: vLLM's kernels read their threads from the environment.
"""

import os
import sys
from pathlib import Path

HEADS, KEY_HEADS, WIDTH, BLOCK, LENGTH = 9, 3, 64, 128, 700
BLOCKS = -(-LENGTH // BLOCK)


def main():
    os.environ.update(OMP_NUM_THREADS="1", VLLM_LOGGING_LEVEL="ERROR")
    sys.path.insert(0, str(Path.cwd()))
    import torch
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    from vllm import _custom_ops as ops

    draw = torch.Generator().manual_seed(0)
    query = torch.randn(LENGTH, HEADS, WIDTH, generator=draw) * 2
    keys, values = torch.zeros(BLOCKS, KEY_HEADS, 2 * BLOCK, WIDTH).chunk(2, dim=2)
    new = [torch.randn(LENGTH, KEY_HEADS, WIDTH, generator=draw) for _ in range(2)]
    ops.cpu_attn_reshape_and_cache(*new, keys, values, torch.arange(LENGTH), "vec", k_scale=1.0, v_scale=1.0,
                                   kv_cache_dtype="auto")  # fmt: skip
    decode = torch.cat([attend(query, keys, values, place, place + 1, 0) for place in range(LENGTH)])
    for tokens in (0, 8):
        whole = attend(query, keys, values, 0, LENGTH, tokens)
        print(int((whole != decode).flatten(1).any(1).sum()))


def attend(query, keys, values, begin, end, tokens):
    """Bits of queries [begin, end) of one request in one call; cut to `tokens` each unless that is 0."""
    import torch
    from test_vllm_invariance import metadata
    from vllm import _custom_ops as ops

    from engines.vllm_invariance import _cut

    given = metadata((end, end - begin))
    given.block_table_tensor = torch.arange(BLOCKS, dtype=torch.int32)[None]
    given = _cut(given, tokens) if tokens else given
    common = {"query_start_loc": given.query_start_loc, "seq_lens": given.seq_lens, "causal": True,
              "dynamic_causal": None, "kv_cache_dtype": "auto"}  # fmt: skip
    plan = ops.cpu_attn_get_scheduler_metadata(
        num_reqs=given.num_reqs, num_heads=HEADS, num_kv_heads=KEY_HEADS, head_dim=WIDTH, dtype=query.dtype,
        sliding_window_size=-1, isa="vec", enable_kv_split=False, **common,
    )  # fmt: skip
    output = torch.empty_like(query[begin:end])
    ops.cpu_attention_with_kv_cache(
        query=query[begin:end], key_cache=keys, value_cache=values, output=output, scale=WIDTH**-0.5, alibi_slopes=None,
        sliding_window=-1, block_table=given.block_table_tensor, softcap=0, scheduler_metadata=plan, s_aux=None,
        k_scale=1.0, v_scale=1.0, **common,
    )  # fmt: skip
    return output.view(torch.int32)


if __name__ == "__main__":
    main()
