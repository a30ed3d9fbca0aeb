"""`px.Model` and what it does: train, evaluate, predict, plan.

Start with `model`.
"""
