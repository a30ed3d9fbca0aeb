"""Checkpoint folders: manifests, listing, pruning, reading.

Start with `folder`.
"""
