"""Hangs: which rank the others wait for, where it is, and why, of a job that runs."""
