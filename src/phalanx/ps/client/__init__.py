"""The worker's side of parameter servers: consistency modes, table parameters, optimizers.

Start with `table_client`.
"""
