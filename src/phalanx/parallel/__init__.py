"""Apply a Plan to a model: data, tensor, pipeline and context parallel, ZeRO, mixed precision, optimizers.

In: a model, its optimizer and a Plan. Out: the same objects, such that a step on N ranks has the result of one process.
Start with `apply`, then `techniques`; `session` holds what was applied, each folder is one technique.
"""
