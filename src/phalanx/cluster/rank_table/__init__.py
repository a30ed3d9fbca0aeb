"""Rank tables: which rank runs on which device of which server.

Start with `rank_table`.
"""
