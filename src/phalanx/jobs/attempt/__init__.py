"""What the controller, the backends and the nodes share of one attempt: files, logs, metrics, commands.

Start with `files`.
"""
