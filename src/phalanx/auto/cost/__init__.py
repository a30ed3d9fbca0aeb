"""Cost model: time and memory of operators, collectives and layers.

In: shapes and a cluster. Out: numbers. Pure. Start with `machine_model`.
"""
