"""Hangs: which rank the others wait for, where it is, and why, of a job that runs.

In: what ranks said last, their stacks, /proc. Out: a verdict: who is waited for, where in the script, and what holds it
up. Start with `watch`, then `verdict`.
"""
