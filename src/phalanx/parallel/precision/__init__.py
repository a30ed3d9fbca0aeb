"""Mixed precision: autocast, loss scaling, float32 master weights.

Start with `autocast`.
"""
