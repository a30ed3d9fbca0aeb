"""Run-time checks: desync of replicas, equal samples, API misuse.

Start with `replica_check`.
"""
