"""Diagnostics: `phalanx doctor`, `phalanx env`, `phalanx calibrate`.

In: a machine, a cluster or a run. Out: reports that name what is wrong and what to do, and measured figures. Start with
`commands`, then the folder of a command.
"""
