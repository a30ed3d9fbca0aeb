"""Rank tables: which rank runs on which device of which server.

In: a rank table file, in any of the layouts that are in use. Out: a `RankTable`, checked, and written again. Start with
`rank_table`.
"""
