"""Training: one step as one call, metrics over all ranks, exact evaluation, the run's event file."""
