"""Benchmarks and tuning for one GPU; they need only torch, triton and numpy beside this package."""
