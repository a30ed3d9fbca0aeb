"""Build a Plan from a `DistributedStrategy`.

Pure. Start with `rules`.
"""
