"""Which samples each rank reads, in which order, with which random numbers.

Pure arithmetic. Start with `order`.
"""
