"""Kubernetes as a backend: one workload an attempt, rendered, created and watched.

Start with `backend`, then `manifests`.
"""
