"""Slurm as a backend: one batch job an attempt, one task a node.

Start with `backend`.
"""
