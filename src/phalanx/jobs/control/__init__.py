"""The job controller: the reconcile loop and the supervision of attempts.

In: jobs that wait, and attempts that run. Out: attempts started, retried and ended, states and events in the store. One
process per home. Start with `controller`.
"""
