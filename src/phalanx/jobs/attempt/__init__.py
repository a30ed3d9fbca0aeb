"""Files, logs, metrics and launch commands of an attempt, shared by controller, backends and nodes.

Start with `files`.
"""
