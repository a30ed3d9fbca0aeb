"""Capture the operators of a training step with fake tensors.

In: a model, a loss, a sample. Out: `CapturedStep`, its module calls and layers. Pure. Start with `step`.
"""
