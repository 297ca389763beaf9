"""Triton kernels, imported only once the triton backend is chosen.

Rules: widen to fp32 after every load (the interpreter keeps bf16 as integers), no atomics (results are bitwise the same
run to run), masks for ragged edges, int64 row offsets.
"""
