"""Triton kernels, imported only once the triton backend is chosen.

Rules: widen to fp32 after every load (the interpreter keeps bf16 as integers), no atomics (two runs give the same
bits), masks for ragged edges, int64 row offsets.
"""
