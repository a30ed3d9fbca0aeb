"""The layers that stand in for torch's where a style shards them.

In: a torch layer and a `ShardSpec`. Out: a layer with this rank's part of its parameters, whose activations are whole
or cut by features (`linear`, `vocab`), or gathered over the rows of all ranks (`gathered_linear`); `dropout` draws the
mask of the whole tensor. `parallel/tensor/styles` says which layer is which. Start with `linear`.
"""
