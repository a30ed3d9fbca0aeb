"""Checkpoint folders: manifests, listing, pruning, reading.

Start with `checkpoint_folder`.
"""
