"""What fills the memory, and how to need less: activation checkpointing.

Start with `activation_checkpointing`.
"""
