"""What a user hands a loader, and batches of samples: read, collated, checked, moved.

Start with `sources`.
"""
