"""Shard single operators of a model by DTensor's rules.

In: sites of a Plan: operators of a model. Out: forward passes in which these operators run sharded. Start with
`placement`.
"""
