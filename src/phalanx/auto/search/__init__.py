"""Search the fastest parallel configuration of a transformer run spec.

Pure. Start with `request`, then `search`.
"""
