"""Optimizer techniques on sharded parameters: clipping, LARS, LAMB, EMA, gradient accumulation."""
