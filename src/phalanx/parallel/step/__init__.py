"""Optimizer step hooks, and what they use: norms, learning rate, parameter replacement.

In: calls of `optimizer.step`. Out: the actions of all techniques around it, in one order (`StepPhase`), and whether it
updated. Start with `hooks`.
"""
