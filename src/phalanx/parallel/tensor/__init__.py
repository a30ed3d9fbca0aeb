"""Tensor parallel: layers of which each rank holds a slice, and which bring the pieces together themselves.

Two forms. Where the ranks along the axis read the same rows (Megatron, Shoeybi et al., arXiv:1909.08053), activations
are whole or cut by features: `linear`, `vocab`, `dropout`. Where they read rows of their own (hybrid, Krizhevsky,
arXiv:1404.5997), a layer gathers the rows of all, computes its features of them, and gives each rank its rows back:
`rows`. `mark` takes what the user says, `swap` puts the layers in place.
"""
