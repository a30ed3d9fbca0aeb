"""Who starts next on this machine, within which quotas.

Pure. Start with `queue`.
"""
