"""Automatic parallelism: capture, cost model, planner, prediction and simulation (no devices needed).

In: a model with loss and sample, or a run spec, and a description of a cluster. Out: a Plan with its time and memory, a
prediction or a simulated step. Opens no socket, starts no rank. Start with `auto_parallel`; `capture` knows the model,
`cost` its price, `planner` and `solver` the choice.
"""
