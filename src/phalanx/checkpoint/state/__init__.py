"""Collect and restore the training state of a rank.

In: the objects of a run (`TrainingState`). Out: this rank's tensors and values to save; and from a checkpoint the same
objects, as they were. Start with `capture`, then `restore`.
"""
