"""Mixed precision: autocast, loss scaling, float32 master weights.

In: a model and a dtype. Out: forward passes in that dtype, scaled losses, float32 weights that the optimizer updates.
Start with `autocast`.
"""
