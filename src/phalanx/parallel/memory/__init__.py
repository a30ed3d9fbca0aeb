"""Activation checkpointing, memory estimates, and what is done when memory runs out.

Start with `activation_checkpointing`, and with the folder `guard` for the last.
"""
