"""Text of the launcher: what a job begins with, which process failed first, and the last lines of its log.

In: exits, logs, facts of the job. Out: the launcher's lines on the terminal, log files of ranks, the failure report
with its root cause. Start with `report`, then `root_cause`.
"""
