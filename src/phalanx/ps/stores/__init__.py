"""Where a worker's tables are: in its own process or on servers, behind one interface.

Start with `base`.
"""
