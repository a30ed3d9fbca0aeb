"""Samples and batches: data sources, collation, checks, device transfer.

Start with `data_source`.
"""
