"""The launcher: start attempts, monitor, restart, report.

In: a `LaunchRequest`. Out: processes of this node that were started, watched and stopped, restarts, an exit code. Start
with `launcher`, then `local_attempt`.
"""
