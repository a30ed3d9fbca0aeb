"""Tensor parallel: sharded linear and embedding layers, context parallel, experts, `px.shard`.

Two forms. Where the ranks along the axis read the same rows (Megatron, Shoeybi et al., arXiv:1909.08053), activations
are whole or cut by features: `layers/linear`, `layers/vocab`. Where they read rows of their own (hybrid, Krizhevsky,
arXiv:1404.5997), a layer gathers the rows of all, computes its features of them, and gives each rank its rows back:
`layers/gathered_linear`. In: a model and styles of its layers. Out: the same model with this rank's parts of them.
Start with `shard_api`, which takes what the user asks for, then `apply_styles`, which replaces the layers.
"""
