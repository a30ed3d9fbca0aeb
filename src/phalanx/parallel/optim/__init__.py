"""Optimizer techniques on sharded parameters: clipping, LARS, LAMB, EMA, gradient accumulation.

In: an optimizer whose parameters may be sharded. Out: the same optimizer, whose step also clips, averages, accumulates
or scales by layer, exact over the ranks. Start with `clip`, then `layerwise`.
"""
