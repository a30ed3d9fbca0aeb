"""The Slurm backend: one batch job per attempt, one task per node.

In: an attempt. Out: an `sbatch` script that was submitted, and its state. Start with `backend`.
"""
