"""Job queue and quotas of one machine.

In: waiting and running jobs, what the machine has, quotas of queues. Out: which job starts next, and why the others
wait. Pure. Start with `queue`.
"""
