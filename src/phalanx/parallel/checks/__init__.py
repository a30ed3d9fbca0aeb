"""Run-time checks: desync of replicas, equal samples, API misuse.

In: parameters, samples and calls of each rank. Out: nothing, or an error on all ranks that names the first difference
or the misuse. Start with `replica_check`.
"""
