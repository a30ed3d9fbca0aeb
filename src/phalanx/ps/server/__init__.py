"""The parameter server: tables, exactly-once pushes, write-ahead log, snapshots.

Requests enter at `service`, become entries of the log that `state` checks and applies, and leave as replies. Start with
`service`, then `state`; `main` is the process around them.
"""
