"""A training step read off a model without running it.

In: a model, a loss, a sample. Out: `CapturedStep`, its module calls and layers. Pure. Start with `step`.
"""
