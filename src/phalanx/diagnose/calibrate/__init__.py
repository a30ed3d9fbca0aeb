"""`phalanx calibrate`: measure operators and collectives of this machine for predictions and plans.

Enters: a machine. Leaves: a profile of rates that `phalanx predict` and `phalanx plan` read. Read `command` first.
"""
