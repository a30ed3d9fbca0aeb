"""The planner: search the fastest Plan of a captured model on a cluster, with an optimality bound.

In: the layers of a captured model, and a machine. Out: a `PlanResult`: the best Plan, how far from the best it can be,
what was not searched and why. Pure. Start with `planner`, then `report.result`.
"""
