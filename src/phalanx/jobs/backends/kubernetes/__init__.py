"""The Kubernetes backend: one workload per attempt, rendered, created and watched.

In: an attempt. Out: objects in a cluster, their state and logs; the manifests alone for `--dry-run`. Start with
`backend`, then `manifests`.
"""
