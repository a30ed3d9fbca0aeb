"""Processes of a job: fork server, entry, environment, and the process that links the nodes.

Start with `fork_server`, then `entry`.
"""
