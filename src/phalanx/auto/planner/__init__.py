"""The planner: search the fastest Plan of a captured model on a cluster, with an optimality bound.

Pure. Start with `planner`, then `report.result`.
"""
