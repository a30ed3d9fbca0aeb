"""Tensor parallel: sharded linear and embedding layers, context parallel, `px.shard`.

Two forms. Where the ranks along the axis read the same rows (Megatron, Shoeybi et al., arXiv:1909.08053), activations
are whole or cut by features: `linear`, `vocab`, `dropout`. Where they read rows of their own (hybrid, Krizhevsky,
arXiv:1404.5997), a layer gathers the rows of all, computes its features of them, and gives each rank its rows back:
`gathered_linear`. `shard_api` takes what the user asks for, `apply_styles` replaces the layers.
"""
