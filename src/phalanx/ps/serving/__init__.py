"""Read-only copies of tables, from a snapshot or from the logs of servers that train, and their answers over HTTP."""
