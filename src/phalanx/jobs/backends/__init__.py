"""Job backends: local, Slurm, Kubernetes; `jobs/backend_registry` lists them."""
