"""Samples and batches: data sources, collation, checks, device transfer.

In: samples by index. Out: checked and collated batches, on the device. Start with `data_source`.
"""
