"""Processes of a job: the fork server, their environment, their entry and output.

Start with `start`.
"""
