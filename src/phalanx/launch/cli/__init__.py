"""The command line of `phalanx run`.

In: the command line of `phalanx run` and its relatives. Out: a `LaunchRequest` for the launcher, or a usage error.
`command` starts the fork server first, since torch takes the longest. Start with `flags`.
"""
