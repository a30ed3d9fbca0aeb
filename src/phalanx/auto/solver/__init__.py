"""Choices with costs in, the cheapest combination and a bound on every other out.

Knows nothing of models. Pure. Start with `problem`, then `solve`.
"""
