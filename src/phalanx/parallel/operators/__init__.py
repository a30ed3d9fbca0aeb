"""Single operators whose outputs a Plan places on ranks, by the rules of DTensor.

Start with `placement`.
"""
