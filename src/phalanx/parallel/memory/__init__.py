"""Activation checkpointing, memory estimates, and what is done when memory runs out.

In: a model, the bytes that a device has. Out: recomputed activations, what a step needs, a step that continues after
memory ran out. Start with `activation_checkpointing`, and with the folder `guard` for the last.
"""
