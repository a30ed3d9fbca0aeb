"""`phalanx verify`: compare two runs of a script step by step, and name the first difference and its likely cause.

In: a script and two ways to run it. Out: the first difference between their records, and a verdict: wrong gradients,
other samples, other initial weights, rounding. Start with `commands`, then `runs` and `between_runs`.
"""
