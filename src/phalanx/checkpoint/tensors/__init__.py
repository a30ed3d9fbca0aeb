"""Checkpoint tensors: local shards, chunks, write assignment, safetensors files.

Start with `local_tensors`.
"""
