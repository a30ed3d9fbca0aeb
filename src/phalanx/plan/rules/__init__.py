"""From a strategy to a Plan.

Pure. Start with `rules`.
"""
