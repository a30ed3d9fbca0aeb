"""From what the user typed, a scheduler or a rank table says and the machine offers to who is who.

Start with `request`.
"""
