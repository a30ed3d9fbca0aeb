"""Data pipelines: `dataset.map(...).shuffle(...).batch(...)` in any order.

Start with `pipeline`.
"""
