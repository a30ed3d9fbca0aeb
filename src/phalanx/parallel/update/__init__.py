"""What a Plan and a strategy add to optimizer steps: LocalSGD, top-k compression, clipping, scaling.

In: the updates of a Plan's parameters. Out: optimizers whose steps do them: all-reduce, LocalSGD, top-k, sharded state.
Start with `optimizer_setup`.
"""
