"""Triton kernels for NVIDIA GPUs (sm_80 and newer), and what compiles them ahead of time.

Owns: the jitted kernels, one per file with its wrapper, tile sizes, and the device arrays of a step (`DevicePlan`).
`backend.TritonKernels` is the way in; the meaning of every kernel is its twin in
kernels/reference.py. Wrappers check nothing that `ops` checks, launch on the current stream, and never
synchronise. The same code runs on CPU tensors under Triton's interpreter.
"""
