"""Click logs: rows of slots with any number of ids each.

Start with `slots`.
"""
