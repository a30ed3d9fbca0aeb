"""Processes of a job: fork server, entry, environment, output.

Start with `fork_server`, then `entry`.
"""
