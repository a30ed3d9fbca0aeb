"""Files, logs, metrics and launch commands of an attempt, shared by controller, backends and nodes.

In: an `AttemptSpec` in a folder. Out: the command that a node starts, exit records, logs, and why it failed. No process
is started here. Start with `files`.
"""
