"""Jobs: what to train, with which code and data, on which machines; queued, supervised, retried, with their logs.

    from phalanx.jobs.spec import TrainingJob

Everything here works from the command line with no server running; a server runs the same code.
"""
