"""Checkpoint folders: manifests, listing, pruning, reading.

In: a manifest and files of tensors. Out: the folder of one step, listed, pruned, and read tensor by tensor. Start with
`checkpoint_folder`.
"""
