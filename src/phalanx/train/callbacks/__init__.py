"""Callbacks of `px.Model` and training loops: checkpoints, loggers, progress, early stopping."""
