"""Iterable datasets: streams, generators, file assignment.

In: files, generators, iterables without length. Out: samples of this rank, each once, and how far each source was read.
Start with `stream_batches`.
"""
