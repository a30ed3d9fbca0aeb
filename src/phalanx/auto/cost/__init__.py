"""Seconds and bytes of operators, collectives and layers on a machine.

In: shapes and a cluster. Out: numbers. Pure. Start with `machine_model`.
"""
