"""What ranks compare so that nothing differs unseen, and loops that would train wrongly.

Start with `replicas`.
"""
