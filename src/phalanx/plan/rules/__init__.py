"""Build a Plan from a `DistributedStrategy`.

In: a `DistributedStrategy`, a `ModelShape` and a mesh size. Out: a Plan with the reason for each rule, or an error that
names the settings. Pure. Start with `rules`.
"""
