"""Search the fastest parallel configuration of a transformer run spec.

In: a run spec, limits and alternatives. Out: the fastest configurations, with what ruled out the others. Pure. Start
with `request`, then `search`.
"""
