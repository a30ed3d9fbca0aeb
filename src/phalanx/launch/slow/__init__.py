"""Slow jobs: which rank the others wait for, how long, and what keeps it."""
