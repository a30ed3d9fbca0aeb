"""The launcher: start attempts, monitor, restart, report.

Start with `launcher`.
"""
