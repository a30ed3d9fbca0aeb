"""A rank's own process: what it tells the launcher of its calls and its time, and its output.

Start with `activity`, the memory that the launcher reads, then `reporter`, which fills it.
"""
