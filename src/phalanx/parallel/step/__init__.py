"""Hooks around `optimizer.step()` and what is done there whatever the Plan.

Start with `hooks`.
"""
