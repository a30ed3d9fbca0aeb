"""What runs on every node of an attempt: `python -m phalanx.jobs.node FOLDER --node K`.

Start with `agent`.
"""
