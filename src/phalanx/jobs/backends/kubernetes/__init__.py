"""The Kubernetes backend: one workload per attempt, rendered, created and watched.

Start with `backend`, then `manifests`.
"""
