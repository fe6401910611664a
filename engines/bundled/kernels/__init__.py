"""The float32 kernels: one C++ file compiled on first use, and a checked fallback where there is no compiler.

It does not know models, requests or schedules. `interface` says what kernels can do, `library` loads them, `build`
compiles, `isa` chooses the instruction set, `fallback` computes without a compiler, `kernels.cpp` is the arithmetic.
"""
