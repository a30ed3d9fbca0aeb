"""Click-log (CTR) datasets with slots of variable length.

Start with `slots`.
"""
