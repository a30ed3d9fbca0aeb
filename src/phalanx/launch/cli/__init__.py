"""The command line of `phalanx run`.

Start with `flags`.
"""
