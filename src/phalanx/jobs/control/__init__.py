"""The job controller: the reconcile loop and the supervision of attempts.

Start with `controller`.
"""
