"""Random faults in jobs of every kind, and what must hold after each: `python -m benchmarks.soak`."""
