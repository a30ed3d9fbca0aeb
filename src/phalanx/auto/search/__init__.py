"""The fastest parallel configuration of a described transformer, with a bound.

Pure. Start with `request`, then `search`.
"""
