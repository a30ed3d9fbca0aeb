"""The embedding table: settings, update rules, native and NumPy implementation.

In: a `TableSpec`, ids, gradients. Out: rows with optimizer state, in C++ (`native`) or NumPy (`reference`), which
agree. Start with `rules`, then `table`.
"""
