"""`phalanx doctor`: the facts of this machine or of every node of a job, and what each means for training.

Enters: what the system reports. Leaves: one check per fact, in one table. Read `command` first, then `checks`.
"""
