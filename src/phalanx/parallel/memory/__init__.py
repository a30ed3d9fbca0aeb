"""Activation checkpointing, memory estimates, and what is done when memory runs out.

Start with `activation_checkpointing`, and with `guard` for the last.
"""
