"""The loop that moves jobs from state to state.

Start with `controller`.
"""
