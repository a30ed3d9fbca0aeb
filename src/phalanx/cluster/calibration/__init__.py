"""How fast a machine was when it was measured.

Pure. Start with `figures`.
"""
