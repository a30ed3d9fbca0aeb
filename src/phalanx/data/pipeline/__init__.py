"""Data pipelines: `dataset.map(...).shuffle(...).batch(...)` in any order.

In: a dataset with columns, and the calls that were chained on it. Out: samples or batches in an order that depends on
the seed alone. Start with `pipeline`.
"""
