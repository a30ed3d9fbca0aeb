"""The Slurm backend: one batch job per attempt, one task per node.

Start with `backend`.
"""
