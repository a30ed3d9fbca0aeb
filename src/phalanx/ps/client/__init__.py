"""The worker's side of parameter servers: consistency modes, table parameters, optimizers.

In: forward passes that ask for rows, and gradients after backward. Out: rows, and pushes as the consistency mode has it
(sync, async, geo, ...). Start with `table_client`.
"""
