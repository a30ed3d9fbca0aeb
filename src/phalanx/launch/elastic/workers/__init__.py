"""Workers beside parameter servers that come and go: who runs, who is frozen, and who leaves the servers' counts.

In: exits of processes and what their host says of them. Out: which workers to start, to kill and to sign off at the
servers. `launch/job/workers_attempt` uses them. Start with `worker_pool`.
"""
