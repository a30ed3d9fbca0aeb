"""Read-only copies of tables, from a snapshot or from the logs of servers that train, and their answers over HTTP.

In: a snapshot, or the logs of servers that still train. Out: rows over HTTP, as they were at one step. Start with
`app`, then `view`.
"""
