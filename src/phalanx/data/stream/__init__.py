"""Iterable datasets: streams, generators, file assignment.

Start with `stream_batches`.
"""
