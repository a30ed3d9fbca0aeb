"""Pipeline parallel: stages of a model on different ranks, micro-batches between them.

In: a model, stages, a number of micro-batches. Out: loss and gradients of the whole batch, of the stages that this rank
holds. Start with `engine`.
"""
