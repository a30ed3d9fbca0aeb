"""Checkpoint tensors: local shards, chunks, write assignment, safetensors files.

In: parameters, however they are sharded. Out: chunks of full tensors, who writes which, and safetensors files with
checksums. Start with `local_tensors`.
"""
