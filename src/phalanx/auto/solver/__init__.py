"""Solvers of the planner: mixed-integer programs, dominance, stage partitioning.

Knows nothing of models. Pure. Start with `problem`, then `solve`.
"""
