"""Job queue and quotas of one machine.

Pure. Start with `queue`.
"""
