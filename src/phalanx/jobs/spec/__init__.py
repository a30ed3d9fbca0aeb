"""The spec of a job: its schema, and what it is read from: YAML, flags, settings, DLC requests.

Enters: texts from outside. Leaves: a checked `TrainingJob`, or an error that names the field. See `training_job` first.
"""
