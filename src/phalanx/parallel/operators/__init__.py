"""Shard single operators of a model by DTensor's rules.

Start with `placement`.
"""
