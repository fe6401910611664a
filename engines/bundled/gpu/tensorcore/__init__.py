"""bfloat16 on the matrix units of an NVIDIA GPU: `tensorcore`, `free` and `native`. Importing it imports nothing.

Needs torch with CUDA and Triton. It does not know requests, scheduling or sampling parameters.
"""
