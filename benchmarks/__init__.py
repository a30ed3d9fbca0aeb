"""Benchmarks against the peers: `python -m benchmarks` runs all, `python -m benchmarks.bench_launch` one."""
