"""Pull and push on tables, in this process or on parameter servers, behind one interface.

Start with `base`.
"""
