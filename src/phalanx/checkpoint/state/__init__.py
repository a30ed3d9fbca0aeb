"""Everything a checkpoint holds of a rank, captured and restored.

Start with `capture`.
"""
