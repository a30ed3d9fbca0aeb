"""Callbacks of `px.Model` and training loops: checkpoints, loggers, progress, early stopping.

In: a `Run` at its epochs and steps. Out: checkpoints, log lines, files, a stop on all ranks together. Start with
`base`, then `run`.
"""
