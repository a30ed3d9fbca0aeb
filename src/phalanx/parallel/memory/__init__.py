"""Activation checkpointing, memory estimates, out-of-memory explanations.

Start with `activation_checkpointing`.
"""
