"""Folders of checkpoints: manifests, the newest complete one, reading.

Start with `folder`.
"""
