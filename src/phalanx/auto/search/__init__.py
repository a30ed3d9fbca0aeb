"""The fastest parallel configuration of a transformer run spec, with a bound.

Pure. Start with `request`, then `search`.
"""
