"""Parameters of a model that live in tables: which optimizer trains them, and when rows are pulled and pushed.

Start with `table_client`.
"""
