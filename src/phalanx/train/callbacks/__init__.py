"""Callbacks: what acts at the edges of a training loop without being part of it."""
