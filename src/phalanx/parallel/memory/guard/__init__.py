"""Repeat what ran out of memory in the call that failed: a model's passes, a loss, an optimizer's first step.

In goes a distributed model or optimizer; out comes the same with passes that repeat themselves. Start with
`guarded_model` (which models) and `guard` (one pass); `remedies` is what changes before a repeat.
"""
