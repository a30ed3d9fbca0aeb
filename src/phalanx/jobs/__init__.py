"""Training jobs: spec, queue, backends (local, Slurm, Kubernetes), controller, retries, logs.

    from phalanx.jobs.spec.training_job import TrainingJob

Everything here works from the command line with no server running; a server runs the same code.
"""
