"""The launcher's main line: start attempts, watch them, restart, report.

Start with `job`.
"""
