"""Processes of a job: fork server, entry, environment, and the process that links the nodes.

In: what a process is to be: script, environment, log file. Out: forked processes with torch loaded, and the wire to
them. Start with `fork_server`, then `entry`.
"""
