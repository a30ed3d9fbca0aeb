"""A captured model and a cluster in, the fastest Plan and a proof of how good it is out.

Pure. Start with `planner`, then `result`.
"""
