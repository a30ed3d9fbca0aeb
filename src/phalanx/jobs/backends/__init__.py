"""Job backends: local, Slurm, Kubernetes; `jobs/backend_registry` lists them.

In: an attempt to start, watch and stop. Out: nodes that run it, and their state as the `Backend` protocol
(`jobs/backend.py`) has it. Start with `local`.
"""
