"""Solvers of the planner: mixed-integer programs, dominance, stage partitioning.

In: a `StepProblem`: nodes with options that cost seconds and bytes, and transitions between them. Out: a `Solution`,
with a bound that nothing beats. Knows nothing of models. Pure. Start with `problem`, then `solve`.
"""
