"""Slow jobs: which rank the others wait for, how long, and what keeps it.

In: seconds that ranks computed and waited, counters of the host. Out: which rank the others wait for, what it costs,
and what keeps it. Start with `watch`, then `stragglers`.
"""
