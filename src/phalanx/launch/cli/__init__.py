"""The flags of `phalanx run`, and its entry.

Start with `flags`.
"""
