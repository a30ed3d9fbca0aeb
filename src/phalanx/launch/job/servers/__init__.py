"""Parameter servers that are started again, or become more or fewer, while workers train.

In: `phalanx restart-servers` and `phalanx scale-servers`. Out: which servers to end and to start, and the tables of
those there are in the hands of others. Start with `commands`, then `scaling`.
"""
