"""`px.Model` and what it does: train, evaluate, predict, plan.

In: a network, loss, optimizer, metrics. Out: `Model.train`, `evaluate`, `predict` and plans, on any number of ranks.
Start with `model`.
"""
